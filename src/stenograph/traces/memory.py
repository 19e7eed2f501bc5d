"""The record in memory: one lock, so that a commit is there whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping

from stenograph.config import SelectConfig
from stenograph.errors import TraceError, UnknownSession
from stenograph.traces.drift import Drift
from stenograph.traces.equivalences import NAMES
from stenograph.traces.matching import Match
from stenograph.traces.payloads import Holder, MemoryPayloads, Payloads, leased
from stenograph.traces.selection import DEFAULT
from stenograph.traces.session import Disposition, Ledger, Opening, SessionInfo, SessionRecord
from stenograph.traces.trace import TraceTree, TurnState
from stenograph.types import Conversation, Sample, Turn


class MemoryTraceStore:
    """A TraceStore that lives and dies with its process. `allowed` names the differences that matching accepts."""

    def __init__(self, allowed: Collection[str] = NAMES) -> None:
        self.payloads: Payloads = MemoryPayloads()
        self._allowed = allowed
        self._lock = threading.RLock()
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

    def get(self, session: str) -> SessionInfo:
        with self._lock:
            return self._held(session).info()

    def tree(self, session: str) -> TraceTree:
        with self._lock:
            return self._held(session).tree

    def match(self, session: str, conversation: Conversation) -> Match | None:
        with self._lock:
            return self._held(session).match(conversation)

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

    def seal(self, session: str, reward: float | None = None, status: str | None = None) -> None:
        with self._lock:
            self._held(session).seal(reward, status)

    def samples(self, session: str, select: SelectConfig = DEFAULT, holder: Holder | None = None) -> list[Sample]:
        with self._lock:
            samples = self._held(session).samples(select)
            if holder is not None:
                self.payloads.lease([routing.payload for sample in samples for routing in sample.experts], holder)
            return samples

    def ledger(self, session: str) -> Ledger:
        with self._lock:
            return self._held(session).ledger()

    def drift(self, session: str) -> list[Drift]:
        with self._lock:
            return list(self._held(session).drift)

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
