"""The seam to the record: what a session's turns are, and where every sampled token ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from stenograph.config import SelectConfig
from stenograph.traces.drift import Drift
from stenograph.traces.matching import Match
from stenograph.traces.payloads import Holder, Payloads
from stenograph.traces.selection import DEFAULT
from stenograph.traces.session import Disposition, Ledger, Opening, SessionInfo
from stenograph.traces.trace import TraceTree, TurnState
from stenograph.types import Conversation, Sample, Turn


class TraceStore(Protocol):
    """Sessions and their turns. Every method may be called from any thread; unknown sessions raise TraceError."""

    @property
    def payloads(self) -> Payloads:
        """What its turns hold by handle alone."""
        ...

    def open(self, opening: Opening) -> None: ...

    def find(self, key_digest: bytes) -> str | None:
        """The session that the key with this digest opens."""
        ...

    def left(self) -> Mapping[str, float]:
        """Sessions that are open and that no process at work has, with their time to live in seconds."""
        ...

    def get(self, session: str) -> SessionInfo: ...

    def tree(self, session: str) -> TraceTree: ...

    def match(self, session: str, conversation: Conversation) -> Match | None:
        """Find the turn that a request goes on from."""
        ...

    def commit(self, session: str, parent: str | None, *turns: Turn) -> None:
        """Record sibling turns that go on from `parent`, atomically: after an error nothing of them is there.

        Their payloads are leased to the session with it. Raises TraceError where one was freed.
        """
        ...

    def mark(self, session: str, turns: Iterable[str], state: TurnState) -> None:
        """Say whether the agent got what it was answered."""
        ...

    def drop(self, session: str, reason: str, num_tokens: int) -> None:
        """Account for tokens that were sampled and are in no turn."""
        ...

    def seal(
        self,
        session: str,
        reward: float | None = None,
        status: str | None = None,
        turn_rewards: Sequence[float] = (),
    ) -> None:
        """Record nothing any more but what another seal says; what it does not say stays as it was.

        `turn_rewards` are of the session's first turns, in the order of their commits. Raises TooManyRewards where
        there are more than turns, and has not sealed then.
        """
        ...

    def samples(self, session: str, select: SelectConfig = DEFAULT, holder: Holder | None = None) -> list[Sample]:
        """The branches that `select` chooses, once settled those that it was settled by, flattened, oldest first.

        Their payloads are leased to `holder`, so that they outlive the session's release, until its own.
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
        """Forget sessions and end their leases; unknown and repeated ids are ignored. Returns those released."""
        ...

    def close(self) -> None:
        """Give back what the store itself holds; sessions that are recorded for good stay so."""
        ...
