"""The record in memory: one lock, so that a commit is there whole or not at all."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stenograph.errors import TraceError
from stenograph.traces.samples import flatten, mask_reason
from stenograph.traces.store import Disposition, Drift, Ledger, SessionInfo, State
from stenograph.traces.trace import TraceTree, TurnState
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
    dropped: Counter[str] = field(default_factory=Counter)  # tokens in no turn, by reason


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

    def commit(self, session: str, parent: str | None, *turns: Turn) -> None:
        with self._lock:
            held = self._held(session)
            if held.state == "sealed":
                raise TraceError(f"session {session} is sealed; nothing can be recorded any more")
            forks = held.tree.add_siblings(turns, parent)
            held.drift += [_fork(turn, parent, at) for turn, at in zip(turns, forks, strict=True) if at is not None]

    def mark(self, session: str, turns: Iterable[str], state: TurnState) -> None:
        with self._lock:
            self._held(session).tree.states.update(dict.fromkeys(turns, state))

    def drop(self, session: str, reason: str, num_tokens: int) -> None:
        with self._lock:
            self._held(session).dropped[reason] += num_tokens

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
            trained = in_flight = 0
            masked: Counter[str] = Counter()
            dropped = Counter(held.dropped)
            sampled = dropped.total()
            for turn in held.tree.turns.values():
                num_tokens = len(turn.output_ids)
                sampled += num_tokens
                disposition = held.settled.get(turn.id)
                if (reason := mask_reason(turn.sampling)) is not None:
                    masked[reason] += num_tokens
                elif disposition is None:
                    in_flight += num_tokens
                elif disposition.kind == "trained":
                    trained += num_tokens
                else:
                    dropped[disposition.reason or "unknown"] += num_tokens
            return Ledger(sampled, trained, dict(masked), dict(dropped), in_flight)

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
