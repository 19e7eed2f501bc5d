"""Who may do what: a session's key opens that session alone, and everything in flight in it has one owner."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import secrets
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from stenograph.dialects.base import SESSION_PREFIX
from stenograph.dialects.minted import turn_id, turn_name
from stenograph.dialects.seen import Seen
from stenograph.errors import RequestError, StenographError, UnknownSession
from stenograph.gateway.calls import Call
from stenograph.gateway.roles import Roles
from stenograph.gateway.stored import StoredResponses
from stenograph.traces.session import Opening
from stenograph.traces.store import TraceStore
from stenograph.traces.trace import TraceTree
from stenograph.types import Turn

log = logging.getLogger(__name__)

KEY_PREFIX = SESSION_PREFIX + "key_"
_HEARD_OUT_S = 1.0
ADMIN_KEY_REMEDY = "the admin key: STENO_ADMIN_KEY, or the one that steno serve printed at its start"


@dataclass(slots=True, eq=False)
class Session:
    """An address that an agent may call. `tasks` are the generations in flight, awaited by seal and close.

    `api_key` is empty where an earlier process opened it, until it is used: the record has a digest of it alone.
    `calls` are those that a repeat may still be given: in flight, or committed and never delivered. `recorded` are the
    turns of such calls that an earlier process had, a tuple a call.
    """

    id: str
    api_key: str
    traced: bool
    ttl_s: float
    metadata: Mapping[str, Any]
    state: Literal["open", "sealed"] = "open"
    stopped: bool = False  # with the gateway, or because another has it; not by its owner
    used_s: float = field(default_factory=time.monotonic)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    calls: dict[str, list[Call]] = field(default_factory=dict)  # by what they ask
    recorded: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)  # likewise
    stored: StoredResponses = field(default_factory=StoredResponses)
    roles: Roles = field(default_factory=Roles)
    seen: Seen = field(default_factory=Seen)  # of its requests' bodies
    num_turns: int = 0
    num_tokens: int = 0  # sampled

    def require_open(self) -> None:
        if self.stopped:
            raise self.closed()
        if self.state == "sealed":
            raise RequestError(f"session {self.id} is sealed; open another", status=409, retry=False)

    def closed(self) -> RequestError:
        """What a call is told that its session's end cut short."""
        if self.stopped or not self.id:  # what has no session ends with the gateway
            return _stopping()
        return RequestError(f"session {self.id} was closed meanwhile; open another", status=409, retry=False)

    def start(self, call: Call, work: Coroutine[Any, Any, None]) -> None:
        """Run a generation as this session's own: it outlives a client that goes away, and ends with the session."""

        def finished(task: asyncio.Task[None]) -> None:
            self.tasks.discard(task)
            self.used_s = time.monotonic()
            if not call.over:  # it was cancelled before it began
                call.failed(self.closed())
            if call.error is not None:
                self.forget(call)

        self.calls.setdefault(call.key, []).append(call)
        call.task = asyncio.create_task(work)
        self.tasks.add(call.task)
        call.task.add_done_callback(finished)

    def forget(self, call: Call) -> None:
        """Nobody can be given this call any more; idempotent."""
        same = [other for other in self.calls.pop(call.key, ()) if other is not call]
        if same:
            self.calls[call.key] = same

    def count(self, turns: Sequence[Turn]) -> None:
        self.num_turns += len(turns)
        self.num_tokens += sum(len(turn.output_ids) for turn in turns)

    async def drain(self, timeout_s: float) -> None:
        """Let what is in flight finish for `timeout_s`, then cancel it; nothing runs afterwards."""
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=timeout_s)
        while self.tasks:
            for task in self.tasks:
                task.cancel()
            await asyncio.wait(self.tasks)

    async def heard_out(self) -> None:
        """Let clients have what is committed: a process that passed it on may be about to say that it has."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_HEARD_OUT_S):
                for call in [call for same in self.calls.values() for call in same]:
                    await call.heard_out()


class Sessions:
    """All sessions and their keys, and the store behind them."""

    def __init__(
        self, store: TraceStore, *, admin_key: str, require_keys: bool, ttl_s: float, idle_s: float = 600.0
    ) -> None:
        self.store = store
        self._idle_s = idle_s
        self._admin_key = admin_key
        self._require_keys = require_keys
        self._ttl_s = ttl_s
        self._sessions: dict[str, Session] = {}
        self._by_key: dict[str, str] = {}  # ids of those that are here, so that the record need not be asked
        self._closing: set[str] = set()  # ids
        self._unsealed: set[str] = set()  # ids of those that expired, and whose record could not be told
        # Those of processes that are gone expire too: when, by their ids, until somebody asks for them.
        self._left = {id: time.monotonic() + ttl_s for id, ttl_s in store.left().items()}
        self._open = True
        self.untraced = Session("", "", traced=False, ttl_s=float("inf"), metadata={})  # the admin's own calls

    def open(self, *, traced: bool, ttl_s: float | None, metadata: Mapping[str, Any]) -> Session:
        if not self._open:
            raise _stopping()
        id = SESSION_PREFIX + secrets.token_hex(16)
        session = Session(id, KEY_PREFIX + secrets.token_hex(16), traced, ttl_s or self._ttl_s, metadata)
        self.store.open(Opening(session.id, metadata, traced, key_digest(session.api_key), session.ttl_s))
        self._sessions[session.id] = session
        self._by_key[session.api_key] = session.id
        return session

    def find(self, id: str) -> Session:
        """A session by its id, from the record where it was opened by another process. Raises 404."""
        session = None if id in self._closing else self._sessions.get(id) or self._recorded(id)
        if session is None:
            told = f"unknown session {id}: it was deleted, or the id is mistyped; POST /sessions opens one"
            raise RequestError(told, status=404, retry=False)
        return session

    def require_admin(self, key: str | None) -> None:
        if self.is_admin(key):
            return
        if self._opened_by(key) is None:
            raise _unauthorised()
        raise RequestError(f"this address needs {ADMIN_KEY_REMEDY}", status=403, retry=False)

    def is_admin(self, key: str | None) -> bool:
        """Whether `key` has the admin's rights, which none needs where keys are not required."""
        # A session's key stays one after the session: what it asks for then would go unrecorded.
        if not self._require_keys and not (key or "").startswith(KEY_PREFIX):
            return True
        return self.holds_admin(key)

    def holds_admin(self, key: str | None) -> bool:
        return key is not None and _same(key, self._admin_key)

    def choose(self, keys: Sequence[str], wanted: str | None) -> str | None:
        """Of the keys that a request carries, the first that opens what it wants; else the one that says most."""

        def rank(key: str) -> int:
            own = self._opened_by(key)
            if self.holds_admin(key) or (own is not None and wanted in (None, own)):
                return 0
            # One of a session that is gone still says whose the request is, before one that says nothing.
            return 1 if own is not None else 2 if key.startswith(KEY_PREFIX) else 3

        return min(keys, key=rank, default=None)

    def authorise(self, key: str | None, wanted: str | None) -> Session:
        """The session that `key` may use: the one named, or the key's own. Raises 401, 403, 404."""
        if wanted is None:
            if self.is_admin(key):
                return self.untraced
            return self._own(key)
        if self.is_admin(key):
            return self.find(wanted)
        if self._opened_by(key) not in (None, wanted):
            told = f"this key belongs to another session than {wanted}, or the id is mistyped"
            raise RequestError(f"{told}; use base_url and api_key of one session", status=403, retry=False)
        return self._own(key)

    async def seal(
        self,
        session: Session,
        timeout_s: float,
        reward: float | None,
        status: str | None,
        turn_rewards: Sequence[float] = (),
    ) -> None:
        """Raises TooManyRewards where there are more than turns: calls are refused then, and it may be sealed again."""
        session.state = "sealed"
        await session.drain(timeout_s)
        session.calls.clear()  # a sealed session repeats nothing
        session.recorded.clear()
        session.seen = Seen()
        self.find(session.id)  # it may have been deleted meanwhile
        self.store.seal(session.id, reward, status, turn_rewards)

    async def close(self, session: Session) -> list[str]:
        """Abort what is in flight, forget the address and release the record."""
        session.state = "sealed"
        self._closing.add(session.id)
        try:
            await session.drain(0)
            await session.heard_out()
            released = self.store.release([session.id])
            self._forget(session.id)
            return released
        finally:
            self._closing.discard(session.id)

    async def lose(self, id: str) -> None:
        """Know no more of a session that another process has; what is in flight here could not be recorded."""
        if (session := self._forget(id)) is not None:
            session.state, session.stopped = "sealed", True
            await session.drain(0)

    async def expire(self, timeout_s: float) -> None:
        """Seal the sessions that were idle for longer than their time to live, and make the others small."""
        now = time.monotonic()
        for id in [id for id, expires_s in self._left.items() if now > expires_s]:
            del self._left[id]
            if id not in self._sessions:
                with suppress(StenographError):  # it was deleted, or another process has it
                    self.find(id).used_s = -math.inf
        for session in list(self._sessions.values()):
            is_over = session.state == "open" and not session.tasks and now - session.used_s > session.ttl_s
            if is_over or session.id in self._unsealed:
                self._unsealed.discard(session.id)
                try:
                    await self.seal(session, timeout_s, None, "expired")
                except Exception:
                    self._unsealed.add(session.id)  # for the next time
                    log.exception("session %s expired, and its record is not sealed", session.id)
            if not session.tasks and now - session.used_s > self._idle_s:
                session.seen = Seen()  # what it will repeat is read again

    async def aclose(self) -> None:
        self._open = False
        for session in (sessions := [*self._sessions.values(), self.untraced]):
            session.state, session.stopped = "sealed", True
        for session in sessions:
            await session.drain(0)

    def _own(self, key: str | None) -> Session:
        id = self._opened_by(key)
        if id is None:
            raise _unauthorised()
        session = self.find(id)
        session.used_s = time.monotonic()
        if key is not None and not session.api_key:
            session.api_key = key
            self._by_key[key] = id
        return session

    def _forget(self, id: str) -> Session | None:
        session = self._sessions.pop(id, None)
        if session is not None:
            self._by_key.pop(session.api_key, None)
        return session

    def _opened_by(self, key: str | None) -> str | None:
        """The id of the session that a key opens. What it is looked up by tells nobody anything about another key."""
        if key is None or not key.startswith(KEY_PREFIX):
            return None
        id = self._by_key.get(key) or self.store.find(key_digest(key))
        return id if id not in self._closing else None

    def _recorded(self, id: str) -> Session | None:
        """A session as it is recorded, under its key again."""
        if not id.isascii():  # headers and paths hold bytes that are no text, and no store can be asked for those
            return None
        if not self._open:
            raise _stopping()
        try:
            info, tree = self.store.get(id), self.store.tree(id)
        except UnknownSession:
            return None
        opening = info.opening
        session = Session(
            id=id,
            api_key="",
            traced=opening.traced,
            ttl_s=opening.ttl_s,
            metadata=opening.metadata,
            state=info.state,
            recorded=_undelivered(tree),
            roles=Roles.recorded(tree),
            num_turns=info.num_turns,
            num_tokens=info.num_tokens,
        )
        self._sessions[id] = session
        return session


def _undelivered(tree: TraceTree) -> dict[str, list[tuple[str, ...]]]:
    """Turns that no client is known to have, by what was asked; siblings are one call's."""
    continued = {tree.parent(turn) for turn in tree.turns}
    calls: dict[str, tuple[str, ...]] = {}
    for turn in tree.turns:
        first = turn_id(turn_name(turn).partition("_")[0])
        calls[first] = (*calls.get(first, ()), turn)
    found: dict[str, list[tuple[str, ...]]] = {}
    for turns in calls.values():
        if continued.isdisjoint(turns) and all(tree.state(turn) != "delivered" for turn in turns):
            found.setdefault(tree.turn(turns[0]).request, []).append(turns)
    return found


def key_digest(key: str) -> bytes:
    """What is kept of a key: enough to know it again, and nothing to use it by."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _same(given: str, key: str) -> bool:
    """Compare in constant time; headers hold bytes that are no text as surrogates."""
    return hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode())


def _stopping() -> RequestError:
    return RequestError("the gateway is shutting down; try again", status=503, headers={"retry-after": "1"})


def _unauthorised() -> RequestError:
    told = "missing or unknown key; send the session's api_key (to /sessions the admin key)"
    told += " as `Authorization: Bearer` or `x-api-key`"
    return RequestError(told, status=401, code="invalid_api_key", retry=False)
