"""The record in memory: one lock, so that a commit is there whole or not at all."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stenograph.config import SelectConfig
from stenograph.errors import TraceError
from stenograph.traces.drift import Drift, explain
from stenograph.traces.equivalences import NAMES
from stenograph.traces.matching import Match, Matcher
from stenograph.traces.samples import flatten, mask_reason
from stenograph.traces.selection import DEFAULT, selected
from stenograph.traces.store import Disposition, Ledger, SessionInfo, State
from stenograph.traces.trace import TraceTree, TurnState
from stenograph.types import Conversation, Sample, Turn


@dataclass(slots=True, eq=False)
class _Session:
    metadata: Mapping[str, Any]
    matcher: Matcher
    tree: TraceTree = field(default_factory=TraceTree)
    state: State = "open"
    reward: float | None = None
    status: str | None = None
    drift: list[Drift] = field(default_factory=list)
    settled: dict[str, list[tuple[Disposition, int]]] = field(default_factory=dict)  # by turn: tokens that ended so
    dropped: Counter[str] = field(default_factory=Counter)  # tokens in no turn, by reason
    num_sampled: int = 0  # counted as they come, so that what is lost on the way shows


class MemoryTraceStore:
    """A TraceStore that lives and dies with its process. `allowed` names the differences that matching accepts."""

    def __init__(self, allowed: Collection[str] = NAMES) -> None:
        self._allowed = allowed
        self._lock = threading.RLock()
        self._sessions: dict[str, _Session] = {}

    def open(self, session: str, metadata: Mapping[str, Any]) -> None:
        with self._lock:
            if session in self._sessions:
                raise TraceError(f"session {session} is open already")
            self._sessions[session] = _Session(dict(metadata), Matcher(self._allowed))

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

    def match(self, session: str, conversation: Conversation) -> Match | None:
        with self._lock:
            held = self._held(session)
            return held.matcher.match(held.tree, conversation)

    def commit(self, session: str, parent: str | None, *turns: Turn) -> None:
        with self._lock:
            held = self._held(session)
            if held.state == "sealed":
                raise TraceError(f"session {session} is sealed; nothing can be recorded any more")
            forks = held.tree.add_siblings(turns, parent)
            held.num_sampled += sum(len(turn.output_ids) for turn in turns)
            forked = [(turn, at) for turn, at in zip(turns, forks, strict=True) if at is not None]
            held.drift += [explain(held.tree, turn, at, self._allowed) for turn, at in forked]

    def mark(self, session: str, turns: Iterable[str], state: TurnState) -> None:
        with self._lock:
            tree = self._held(session).tree
            for turn in turns:
                tree.mark(turn, state)

    def drop(self, session: str, reason: str, num_tokens: int) -> None:
        with self._lock:
            held = self._held(session)
            held.dropped[reason] += num_tokens
            held.num_sampled += num_tokens

    def seal(self, session: str, reward: float | None = None, status: str | None = None) -> None:
        with self._lock:
            held = self._held(session)
            held.state = "sealed"
            held.reward = held.reward if reward is None else reward
            held.status = held.status if status is None else status

    def samples(self, session: str, select: SelectConfig = DEFAULT) -> list[Sample]:
        with self._lock:
            held = self._held(session)
            return flatten(session, held.tree, select, held.reward, held.metadata)

    def ledger(self, session: str) -> Ledger:
        with self._lock:
            held = self._held(session)
            trained = in_flight = 0
            masked: Counter[str] = Counter()
            dropped = Counter(held.dropped)
            for turn in held.tree.turns.values():
                num_tokens = len(turn.output_ids)
                if (reason := mask_reason(turn.sampling)) is not None:
                    masked[reason] += num_tokens
                    continue
                if turn.id not in held.settled:
                    in_flight += num_tokens
                for disposition, num_ended in held.settled.get(turn.id, ()):
                    if disposition.kind == "trained":
                        trained += num_ended
                    else:
                        dropped[disposition.reason or "unknown"] += num_ended
            return Ledger(held.num_sampled, trained, dict(+masked), dict(+dropped), in_flight)  # + leaves zeros out

    def drift(self, session: str) -> list[Drift]:
        with self._lock:
            return list(self._held(session).drift)

    def settle(self, session: str, disposition: Disposition, select: SelectConfig = DEFAULT) -> None:
        with self._lock:
            held = self._held(session)
            chosen = selected(held.tree, select)
            for name, turn in held.tree.turns.items():
                if name in held.settled:
                    continue
                num_tokens = len(turn.output_ids)
                ended = []
                if (dropped := chosen.dropped.get(name)) is not None:
                    ended.append((Disposition("dropped", dropped.reason), dropped.num_tokens))
                    num_tokens -= dropped.num_tokens
                held.settled[name] = [*ended, (disposition, num_tokens)]

    def release(self, sessions: Iterable[str]) -> list[str]:
        with self._lock:
            released = []
            for session in sessions:
                if session in self._sessions:
                    self._sessions[session].tree.release()
                    del self._sessions[session]  # only now: nothing that failed may be out of reach
                    released.append(session)
            return released

    def _held(self, session: str) -> _Session:
        held = self._sessions.get(session)
        if held is None:
            raise TraceError(f"unknown session {session}")
        return held
