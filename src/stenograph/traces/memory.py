"""The record in memory: one lock, so that a commit is there whole or not at all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from stenograph.config import SelectConfig
from stenograph.errors import TraceError, UnknownSession
from stenograph.traces.equivalences import NAMES
from stenograph.traces.payloads import Holder, MemoryPayloads, Payloads, leased
from stenograph.traces.reading import Reading
from stenograph.traces.selection import DEFAULT
from stenograph.traces.session import Disposition, Opening, SessionRecord
from stenograph.traces.trace import TurnState
from stenograph.types import Turn


class MemoryTraceStore(Reading):
    """A TraceStore that lives and dies with its process. `allowed` names the differences that matching accepts."""

    def __init__(self, allowed: Collection[str] = NAMES) -> None:
        super().__init__()
        self.payloads: Payloads = MemoryPayloads()
        self._allowed = allowed
        self._sessions: dict[str, SessionRecord] = {}
        self._by_key: dict[bytes, str] = {}

    def open(self, opening: Opening) -> None:
        with self._lock:
            if opening.id in self._sessions:
                raise TraceError(f"session {opening.id} is open already")
            self._sessions[opening.id] = SessionRecord(opening, self._allowed)
            if opening.key_digest:
                self._by_key[opening.key_digest] = opening.id

    def find(self, key_digest: bytes) -> str | None:
        with self._lock:
            return self._by_key.get(key_digest)

    def left(self) -> Mapping[str, float]:
        return {}

    def commit(self, session: str, parent: str | None, *turns: Turn) -> None:
        experts = [turn.experts for turn in turns if turn.experts is not None]
        with self._lock:
            held = self._held(session)
            with leased(self.payloads, experts, Holder("session", session)):
                held.commit(parent, turns)

    def mark(self, session: str, turns: Iterable[str], state: TurnState) -> None:
        with self._lock:
            self._held(session).mark(turns, state)

    def drop(self, session: str, reason: str, num_tokens: int) -> None:
        with self._lock:
            self._held(session).drop(reason, num_tokens)

    def seal(
        self,
        session: str,
        reward: float | None = None,
        status: str | None = None,
        turn_rewards: Sequence[float] = (),
    ) -> None:
        with self._lock:
            held = self._held(session)
            held.seal(reward, status, held.by_turn(turn_rewards))

    def settle(self, session: str, disposition: Disposition, select: SelectConfig = DEFAULT) -> None:
        with self._lock:
            held = self._held(session)
            held.settle(*held.ending(disposition, select))

    def release(self, sessions: Iterable[str]) -> list[str]:
        with self._lock:
            released = []
            for session in sessions:
                if (held := self._sessions.get(session)) is not None:
                    held.tree.release()
                    self.payloads.release([Holder("session", session)])
                    self._by_key.pop(held.opening.key_digest, None)
                    del self._sessions[session]  # only now: nothing that failed may be out of reach
                    released.append(session)
            return released

    def close(self) -> None:
        """Nothing is held outside this process."""

    def _held(self, session: str) -> SessionRecord:
        held = self._sessions.get(session)
        if held is None:
            raise UnknownSession(session)
        return held
