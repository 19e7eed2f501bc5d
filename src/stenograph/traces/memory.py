"""The record in memory: one lock, so that a commit is there whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stenograph.errors import TraceError
from stenograph.traces.samples import flatten, mask_reason
from stenograph.traces.store import Disposition, Drift, Ledger, SessionInfo, State
from stenograph.traces.tree import TraceTree
from stenograph.types import Sample, Turn


@dataclass(slots=True, eq=False)
class _Session:
    metadata: Mapping[str, Any]
    tree: TraceTree = field(default_factory=TraceTree)
    state: State = "open"
    reward: float | None = None
    status: str | None = None
    drift: list[Drift] = field(default_factory=list)
    settled: dict[str, Disposition] = field(default_factory=dict)  # by turn


class MemoryTraceStore:
    """A TraceStore that lives and dies with its process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sessions: dict[str, _Session] = {}

    def open(self, session: str, metadata: Mapping[str, Any]) -> None:
        with self._lock:
            if session in self._sessions:
                raise TraceError(f"session {session} is open already")
            self._sessions[session] = _Session(dict(metadata))

    def get(self, session: str) -> SessionInfo:
        with self._lock:
            held = self._held(session)
            turns = held.tree.turns.values()
            versions = [version for turn in turns for _, version in turn.versions]
            return SessionInfo(
                id=session,
                state=held.state,
                num_turns=len(turns),
                num_tokens=sum(len(turn.output_ids) for turn in turns),
                policy_versions=(min(versions), max(versions)) if versions else None,
                metadata=held.metadata,
                reward=held.reward,
                status=held.status,
            )

    def tree(self, session: str) -> TraceTree:
        with self._lock:
            return self._held(session).tree

    def commit(self, session: str, parent: str | None, turn: Turn) -> None:
        with self._lock:
            held = self._held(session)
            if held.state == "sealed":
                raise TraceError(f"session {session} is sealed; nothing can be recorded any more")
            fork = held.tree.add(turn, parent)
            if fork is not None:
                held.drift.append(_fork(turn, parent, fork))

    def seal(self, session: str, reward: float | None = None, status: str | None = None) -> None:
        with self._lock:
            held = self._held(session)
            held.state = "sealed"
            held.reward = held.reward if reward is None else reward
            held.status = held.status if status is None else status

    def samples(self, session: str) -> list[Sample]:
        with self._lock:
            held = self._held(session)
            return flatten(session, held.tree, held.reward, held.metadata)

    def ledger(self, session: str) -> Ledger:
        with self._lock:
            held = self._held(session)
            sampled = trained = in_flight = 0
            masked: dict[str, int] = {}
            dropped: dict[str, int] = {}
            for turn in held.tree.turns.values():
                num_tokens = len(turn.output_ids)
                sampled += num_tokens
                disposition = held.settled.get(turn.id)
                if (reason := mask_reason(turn.sampling)) is not None:
                    masked[reason] = masked.get(reason, 0) + num_tokens
                elif disposition is None:
                    in_flight += num_tokens
                elif disposition.kind == "trained":
                    trained += num_tokens
                else:
                    reason = disposition.reason or "unknown"
                    dropped[reason] = dropped.get(reason, 0) + num_tokens
            return Ledger(sampled, trained, masked, dropped, in_flight)

    def drift(self, session: str) -> list[Drift]:
        with self._lock:
            return list(self._held(session).drift)

    def settle(self, session: str, disposition: Disposition) -> None:
        with self._lock:
            held = self._held(session)
            for turn in held.tree.turns:
                held.settled.setdefault(turn, disposition)

    def release(self, sessions: Iterable[str]) -> list[str]:
        with self._lock:
            return [session for session in sessions if self._sessions.pop(session, None) is not None]

    def _held(self, session: str) -> _Session:
        held = self._sessions.get(session)
        if held is None:
            raise TraceError(f"unknown session {session}")
        return held


def _fork(turn: Turn, parent: str | None, token: int) -> Drift:
    return Drift(
        turn=turn.id,
        parent_turn=parent,
        message=None,
        role=None,
        field=None,
        before=None,
        after=None,
        char=None,
        token=token,
        cause="unknown",
    )
