"""What is asked of a store is asked of its sessions' records, one thread at a time."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from stenograph.config import SelectConfig
from stenograph.traces.drift import Drift
from stenograph.traces.matching import Match
from stenograph.traces.payloads import Holder, Payloads
from stenograph.traces.selection import DEFAULT
from stenograph.traces.session import Ledger, SessionInfo, SessionRecord
from stenograph.traces.trace import TraceTree
from stenograph.types import Conversation, Sample


class Reading(ABC):
    """The half of a TraceStore that changes nothing, over the records that the other half holds."""

    payloads: Payloads

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @abstractmethod
    def _held(self, session: str) -> SessionRecord:
        """The record of a session, under the lock. Raises UnknownSession."""

    def get(self, session: str) -> SessionInfo:
        with self._lock:
            return self._held(session).info()

    def tree(self, session: str) -> TraceTree:
        with self._lock:
            return self._held(session).tree

    def match(self, session: str, conversation: Conversation) -> Match | None:
        with self._lock:
            return self._held(session).match(conversation)

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
