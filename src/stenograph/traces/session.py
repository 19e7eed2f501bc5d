"""One session's record: its turns and where each of their tokens ended, whoever keeps it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stenograph.config import SelectConfig
from stenograph.errors import TooManyRewards, TraceError
from stenograph.traces.drift import Drift, explain
from stenograph.traces.equivalences import NAMES
from stenograph.traces.matching import Match, Matcher
from stenograph.traces.samples import flatten, mask_reason
from stenograph.traces.selection import DEFAULT, Selection, selected
from stenograph.traces.trace import TraceTree, TurnState
from stenograph.types import Conversation, Sample, Turn

State = Literal["open", "sealed"]


@dataclass(frozen=True, slots=True)
class Opening:
    """What a session is opened with: who may use it, for how long without a call, and what its owner says of it.

    An untraced session has an address and no turns.
    """

    id: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    traced: bool = True
    key_digest: bytes = b""  # of the key that opens it; empty: none does
    ttl_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as outsiders see it."""

    id: str
    state: State
    num_turns: int
    num_tokens: int  # sampled
    policy_versions: tuple[int, int] | None  # oldest, newest
    metadata: Mapping[str, Any]
    reward: float | None
    status: str | None
    opening: Opening


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where sampled tokens ended: trained + masked + dropped + in_flight = sampled, at every moment.

    Each is counted once, however many samples hold it. `masked` has the reasons of `samples.mask_reason`; they hold
    from the commit on. `dropped` has those of `selection.selected` (`unadopted`, `role`, `overlong`), those of
    generations that became no turn (`aborted`, `engine_failed`, `commit_failed`), what `settle` is told
    (`step_skipped`, `rollout_failed`, `interrupted`), `released` for what nobody settled before its session's end, and
    `quarantined` for turns that a journal could not give back. `in_flight` is what nobody has settled.
    """

    sampled: int = 0
    trained: int = 0
    masked: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    in_flight: int = 0

    @property
    def balanced(self) -> bool:
        ended = self.trained + sum(self.masked.values()) + sum(self.dropped.values())
        return ended + self.in_flight == self.sampled


@dataclass(frozen=True, slots=True)
class Disposition:
    """What became of tokens: `trained`, or `dropped` for `reason`."""

    kind: Literal["trained", "dropped"]
    reason: str | None = None


Ended = dict[str, list[tuple[Disposition, int]]]  # by turn: so many tokens ended so


@dataclass(slots=True, eq=False)
class SessionRecord:
    """Turns, and what is known of the session they are in. Not thread-safe: its store has a lock.

    `allowed` names the differences that matching accepts.
    """

    opening: Opening
    allowed: Collection[str] = NAMES
    tree: TraceTree = field(default_factory=TraceTree)
    state: State = "open"
    reward: float | None = None
    status: str | None = None
    turn_rewards: dict[str, float] = field(default_factory=dict)  # by turn
    drift: list[Drift] = field(default_factory=list)
    selection: Selection | None = None  # what its samples were when it was settled
    settled: Ended = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)  # tokens in no turn, by reason
    num_sampled: int = 0  # counted as they come, so that what is lost on the way shows
    num_bytes: int = 0  # about what it takes in memory
    released: bool = False  # read back after its end
    _matcher: Matcher = field(init=False)

    def __post_init__(self) -> None:
        self._matcher = Matcher(self.allowed)

    @property
    def id(self) -> str:
        return self.opening.id

    # --- what happens to it ------------------------------------------------------------------------------------------

    def check(self, parent: str | None, turns: Sequence[Turn]) -> None:
        """Raise TraceError where `commit` would."""
        self._check_open()
        self.tree.check(turns, parent)

    def commit(self, parent: str | None, turns: Sequence[Turn]) -> None:
        """Record siblings that go on from `parent`, all or none of them."""
        self._check_open()
        forks = self.tree.add_siblings(turns, parent)
        self.num_sampled += sum(len(turn.output_ids) for turn in turns)
        self.num_bytes += sum(map(_num_bytes, turns))
        forked = [(turn, at) for turn, at in zip(turns, forks, strict=True) if at is not None]
        self.drift += [explain(self.tree, turn, at, self.allowed) for turn, at in forked]

    def mark(self, turns: Iterable[str], state: TurnState) -> None:
        for turn in turns:
            self.tree.mark(turn, state)

    def drop(self, reason: str, num_tokens: int) -> None:
        self.dropped[reason] += num_tokens
        self.num_sampled += num_tokens

    def seal(self, reward: float | None, status: str | None, turn_rewards: Mapping[str, float]) -> None:
        """What is given replaces what was given before. `turn_rewards`, by turn, replace all there were."""
        self.state = "sealed"
        self.reward = self.reward if reward is None else reward
        self.status = self.status if status is None else status
        self.turn_rewards = dict(turn_rewards) or self.turn_rewards

    def settle(self, ended: Ended, selection: Selection) -> None:
        """Take note of what `ending` says; the first selection is the one that samples are made from."""
        self.settled |= ended
        self.selection = self.selection or selection

    def ending(self, disposition: Disposition, select: SelectConfig) -> tuple[Ended, Selection]:
        """How the tokens end that had not yet, and what `select` chooses.

        Those in no sample are dropped for the reason that `select` gives, the others end as `disposition` says.
        """
        chosen = selected(self.tree, select)
        ended: Ended = {}
        for name, turn in self.tree.turns.items():
            if name in self.settled:
                continue
            num_tokens, ended[name] = len(turn.output_ids), []
            if (dropped := chosen.dropped.get(name)) is not None:
                ended[name].append((Disposition("dropped", dropped.reason), dropped.num_tokens))
                num_tokens -= dropped.num_tokens
            ended[name].append((disposition, num_tokens))
        return ended, chosen

    def _check_open(self) -> None:
        if self.state == "sealed":
            raise TraceError(f"session {self.id} is sealed; nothing can be recorded any more")

    # --- what is asked of it -----------------------------------------------------------------------------------------

    def info(self) -> SessionInfo:
        turns = self.tree.turns.values()
        versions = [version for turn in turns for _, version in turn.versions]
        return SessionInfo(
            id=self.id,
            state=self.state,
            num_turns=len(turns),
            num_tokens=sum(len(turn.output_ids) for turn in turns),
            policy_versions=(min(versions), max(versions)) if versions else None,
            metadata=self.opening.metadata,
            reward=self.reward,
            status=self.status,
            opening=self.opening,
        )

    def by_turn(self, turn_rewards: Sequence[float]) -> dict[str, float]:
        """Rewards of the first turns that were committed, by turn. Raises TooManyRewards."""
        turns = self.tree.turns
        if len(turn_rewards) > len(turns):
            raise TooManyRewards(len(turn_rewards), len(turns))
        return dict(zip(turns, turn_rewards, strict=False))

    def match(self, conversation: Conversation) -> Match | None:
        return self._matcher.match(self.tree, conversation)

    def samples(self, select: SelectConfig = DEFAULT) -> list[Sample]:
        """One sample per branch that `select` chooses, once settled per branch that it was settled by; oldest first.

        Raises TraceError as `samples.flatten` does.
        """
        selection = self.selection or selected(self.tree, select)
        return flatten(self.id, self.tree, selection, self.reward, self.turn_rewards, self.opening.metadata)

    def ledger(self) -> Ledger:
        trained = in_flight = 0
        masked: Counter[str] = Counter()
        dropped = Counter(self.dropped)
        for turn in self.tree.turns.values():
            num_tokens = len(turn.output_ids)
            if (reason := mask_reason(turn.sampling)) is not None:
                masked[reason] += num_tokens
                continue
            if turn.id not in self.settled:
                if self.released:
                    dropped["released"] += num_tokens
                else:
                    in_flight += num_tokens
            for disposition, num_ended in self.settled.get(turn.id, ()):
                if disposition.kind == "trained":
                    trained += num_ended
                else:
                    dropped[disposition.reason or "unknown"] += num_ended
        return Ledger(self.num_sampled, trained, dict(+masked), dict(+dropped), in_flight)  # + leaves zeros out


_TURN_BYTES = 2048  # of a turn without its ids and texts


def _num_bytes(turn: Turn) -> int:
    said = (*turn.messages, turn.reply)
    num_chars = sum(len(one.content) + len(one.reasoning) for one in said)
    num_chars += sum(len(call.arguments) for one in said for call in one.tool_calls)
    return turn.context_ids.nbytes + turn.output_ids.nbytes + turn.rollout_logprobs.nbytes + num_chars + _TURN_BYTES
