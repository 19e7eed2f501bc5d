"""A record instead of a model: a prompt that is recorded gets its recorded answer, any other is a difference."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from itertools import pairwise

from stenograph.dialects.minted import turn_id, turn_name
from stenograph.engines.base import Capabilities, Chunk, Generate
from stenograph.engines.scripted import ScriptedEngine
from stenograph.errors import RequestError
from stenograph.traces.drift import Drift, compare
from stenograph.traces.session import SessionRecord
from stenograph.types import Ids, Turn

_QUOTED = 40  # characters from the first that differs on


class ReplayEngine(ScriptedEngine):
    """Plays what is recorded in one session, to any number of sessions: each gets all of it, but for routed experts.

    Turns with the same prompt are given in the order in which they were asked for, and the last of them again where it
    is asked for once more. `differs` is called with each prompt that is not recorded.
    """

    def __init__(
        self, record: SessionRecord, differs: Callable[[Drift], None], *, context_length: int = 1_000_000
    ) -> None:
        super().__init__([])
        turns = list(record.tree.turns.values())
        self.capabilities = Capabilities(
            context_length=context_length,
            logprobs_mode=turns[0].logprobs_mode if turns else "raw",
            constrained=any(turn.sampling.constrained for turn in turns),
        )
        self._record = record
        self._differs = differs
        self._answers: defaultdict[bytes, list[Turn]] = defaultdict(list)  # by the digest of their prompt
        for turn in sorted(turns, key=lambda turn: turn.started_s):  # what was asked first need not end first
            path = record.tree.path_ids(turn.id)
            self._answers[_digest(path[: len(path) - len(turn.output_ids)])].append(turn)
        self._num_given: Counter[tuple[str, bytes]] = Counter()  # by session and prompt
        self._promised: dict[tuple[str, str], Turn] = {}  # by session and the id that the turn has there
        self._met: defaultdict[str, set[str]] = defaultdict(set)  # turns, by the session that they were given to
        self.num_repeated = 0  # answers beyond those that were recorded
        self.num_cut = 0  # answers shorter than they were recorded

    @property
    def replayed(self) -> set[str]:
        """The turns that were given."""
        return set().union(*self._met.values())

    def names(self, session: str, prompt: Ids, names: Sequence[str]) -> Sequence[str]:
        """The names in the record of the turns that will be given to `session`; the proposed ones of all others."""
        named = []
        for name in names:
            turn, is_again = self._answering(session, prompt)
            if turn is None:
                return names
            named.append(name if is_again else turn_name(turn.id))
            self._promised[session, turn_id(named[-1])] = turn
        return named

    async def _answer(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        turn = self._promised.pop((request.session, request.turn), None)
        if turn is None:
            turn, _ = self._answering(request.session, request.ids)
        if turn is None:
            raise self._difference(request)
        self._met[request.session].add(turn.id)
        num_tokens = min(len(turn.output_ids), request.sampling.max_tokens)
        self.num_cut += num_tokens < len(turn.output_ids)
        for chunk in _chunks(turn, num_tokens):
            await asyncio.sleep(0)
            await self._thawed.wait()
            if self._aborted.is_set():
                yield Chunk(chunk.ids[:0], chunk.logprobs[:0], chunk.version, "abort")
                return
            yield chunk

    def _answering(self, session: str, prompt: Ids) -> tuple[Turn | None, bool]:
        """The turn that answers `prompt`, and whether it was given before."""
        digest = _digest(prompt)
        turns = self._answers.get(digest)
        if turns is None:
            return None, False
        number = self._num_given[session, digest]
        self._num_given[session, digest] += 1
        is_again = number >= len(turns)
        self.num_repeated += is_again
        return turns[min(number, len(turns) - 1)], is_again

    def _difference(self, request: Generate) -> RequestError:
        record, conversation = self._record, request.conversation
        match = record.match(conversation)
        asked, parent = (match.asked, match.turn) if match is not None else (conversation, None)
        drift = compare(record.tree, asked, parent, request.ids, record.allowed, self._met[request.session])
        self._differs(drift)
        told = f"this request is not in the record of {record.id}: {_told(drift)}"
        return RequestError(told, code="not_recorded", retry=False)


def _told(drift: Drift) -> str:
    """What differs, in a line."""
    if drift.cause == "unknown":
        return f"nothing was asked there after {drift.parent_turn}" if drift.parent_turn else "nothing there is like it"
    place = [f"message {drift.message} ({drift.role})"] if drift.message is not None else []
    place += [str(drift.field)] if drift.field is not None else []
    place += [f"character {drift.char}"] if drift.char is not None else [f"token {drift.token}"]
    told = f"{drift.cause} at {', '.join(place)}"
    if drift.before is not None and drift.after is not None:
        recorded, came = _around(drift.before, drift.after)
        told += f": {recorded!r} is recorded, {came!r} came"
    return told + (f"; {drift.setting} = true accepts it" if drift.setting else "")


def _around(before: str, after: str) -> tuple[str, str]:
    pairs = enumerate(zip(before, after, strict=False))
    start = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(before), len(after)))
    return before[start : start + _QUOTED], after[start : start + _QUOTED]


def _chunks(turn: Turn, num_tokens: int) -> Iterator[Chunk]:
    """The first `num_tokens` of a turn, one by one; in one piece where a stop string ended it, for more came with that.

    How many came at once is not recorded, and tokens of reasoning are counted up to the end of a chunk.
    """
    versions = [(start, version) for start, version in turn.versions if start < num_tokens] or [(0, 0)]
    starts = {0, *(start for start, _ in versions)}
    starts |= set(range(num_tokens)) if turn.stopped_by is None else set()
    for start, end in pairwise([*sorted(starts), num_tokens]):
        whole = end == len(turn.output_ids)
        yield Chunk(
            turn.output_ids[start:end],
            turn.rollout_logprobs[start:end],
            next(version for first, version in reversed(versions) if first <= start),
            None if end < num_tokens else turn.finish_reason if whole else "length",
        )


def _digest(ids: Ids) -> bytes:
    return hashlib.sha256(ids.tobytes()).digest()
