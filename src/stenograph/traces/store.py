"""The seam to the record: what a session's turns are, and where every sampled token ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from stenograph.config import SelectConfig
from stenograph.traces.drift import Drift
from stenograph.traces.matching import Match
from stenograph.traces.selection import DEFAULT
from stenograph.traces.trace import TraceTree, TurnState
from stenograph.types import Conversation, Sample, Turn

State = Literal["open", "sealed"]


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


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where sampled tokens ended: trained + masked + dropped + in_flight = sampled, at every moment.

    Each is counted once, however many samples hold it. `masked` has the reasons of `samples.mask_reason`; they hold
    from the commit on. `dropped` has those of `selection.selected` (`unadopted`, `role`, `overlong`), those of
    generations that became no turn (`aborted`, `engine_failed`, `commit_failed`), and what `settle` is told
    (`step_skipped`, `rollout_failed`). `in_flight` is what nobody has settled.
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


class TraceStore(Protocol):
    """Sessions and their turns. Every method may be called from any thread; unknown sessions raise TraceError."""

    def open(self, session: str, metadata: Mapping[str, Any]) -> None: ...

    def get(self, session: str) -> SessionInfo: ...

    def tree(self, session: str) -> TraceTree: ...

    def match(self, session: str, conversation: Conversation) -> Match | None:
        """Find the turn that a request goes on from."""
        ...

    def commit(self, session: str, parent: str | None, *turns: Turn) -> None:
        """Record sibling turns that go on from `parent`, atomically: after an error nothing of them is there."""
        ...

    def mark(self, session: str, turns: Iterable[str], state: TurnState) -> None:
        """Say whether the agent got what it was answered."""
        ...

    def drop(self, session: str, reason: str, num_tokens: int) -> None:
        """Account for tokens that were sampled and are in no turn."""
        ...

    def seal(self, session: str, reward: float | None = None, status: str | None = None) -> None: ...

    def samples(self, session: str, select: SelectConfig = DEFAULT) -> list[Sample]:
        """The branches that `select` chooses, flattened, oldest first.

        Raises TraceError, naming the turns, where a branch cannot be flattened truly.
        """
        ...

    def ledger(self, session: str) -> Ledger: ...

    def drift(self, session: str) -> list[Drift]: ...

    def settle(self, session: str, disposition: Disposition, select: SelectConfig = DEFAULT) -> None:
        """Say what became of the trainable tokens of `samples(session, select)`; a token is settled once.

        Those that are in no sample are dropped for the reason that `select` gives.
        """
        ...

    def release(self, sessions: Iterable[str]) -> list[str]:
        """Forget sessions; unknown and repeated ids are ignored. Returns those released."""
        ...
