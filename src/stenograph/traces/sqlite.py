"""The record in a journal, and in memory what is at work: a turn is written first, then made."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from stenograph.config import SelectConfig
from stenograph.errors import OwnedElsewhere, TraceError, UnknownSession
from stenograph.traces.equivalences import NAMES
from stenograph.traces.journal import Journal
from stenograph.traces.owners import Owner
from stenograph.traces.payloads import Holder, Payloads, new_payload
from stenograph.traces.reading import Reading
from stenograph.traces.recovery import settled
from stenograph.traces.selection import DEFAULT
from stenograph.traces.session import Disposition, Opening, SessionRecord
from stenograph.traces.trace import TurnState
from stenograph.types import Payload, Turn

log = logging.getLogger(__name__)

_PERIOD_S = 1.0  # of the housekeeping
_MOST_WAL_BYTES = 16 * 2**20  # before it is written back: most pages are written again and again


@dataclass(frozen=True, slots=True)
class _Note:
    """What became of a session, to be written."""

    session: str
    kind: str
    record: dict[str, Any]


@dataclass(slots=True, eq=False)
class _Held:
    record: SessionRecord
    used_s: float = field(default_factory=time.monotonic)


class SqliteTraceStore(Reading):
    """A TraceStore whose turns survive its process.

    Sessions that nobody asked for in `idle_s`, and the longest unused ones where all take more than `memory_bytes`, are
    let go from memory and read again when they are asked for. `address` is where other processes reach this one's
    sessions: one that another store has raises OwnedElsewhere. What is said of tokens that are spent already, by `mark`
    and `drop`, stands though the disk has no room for it: it is written before whatever is written next.
    """

    def __init__(
        self,
        path: Path,
        allowed: Collection[str] = NAMES,
        *,
        keep: str = "all",
        idle_s: float = 600.0,
        memory_bytes: float = float("inf"),
        address: str = "",
    ) -> None:
        super().__init__()
        self.address = address
        self._allowed = allowed
        self._keep = keep
        self._idle_s = idle_s
        self._memory_bytes = memory_bytes
        self._sessions: dict[str, _Held] = {}  # the longest unused first
        self._num_bytes = 0
        self._unwritten: deque[_Note] = deque()  # their sessions stay in memory
        self._journal = Journal.writing(path)
        self.path = self._journal.path
        self._owner = Owner(self.path)
        self._journal.enrol(self._owner.id, address)
        self.payloads: Payloads = _Payloads(self._journal, self._lock, self._owner.id)
        self._closing = threading.Event()
        house = Journal.writing(path)  # a connection of its own, so that nobody waits while it writes the log back
        self._housekeeping = threading.Thread(
            target=self._keep_house, args=(house,), name="stenograph-journal", daemon=True
        )
        self._housekeeping.start()

    def begin(self, config: str, tokenizer: str) -> None:
        """As `Journal.begin`."""
        with self._lock:
            self._journal.begin(config, tokenizer)

    def close(self) -> None:
        """Give the sessions back and close the database; safe to call twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._housekeeping.join()
        with self._lock:
            try:
                self._catch_up()
            except TraceError as e:
                log.warning("%s; %d marks and drops are lost", e, len(self._unwritten))
            try:
                self._journal.retire(self._owner.id)
                self._journal.checkpoint()
            except TraceError as e:
                log.warning("%s", e)
            finally:
                self._sessions.clear()
                self._journal.close()
                self._owner.close()

    # --- writing -----------------------------------------------------------------------------------------------------

    def open(self, opening: Opening) -> None:
        with self._lock:
            self._journal.open(opening, self._allowed, self._owner.id)
            self._hold(SessionRecord(opening, self._allowed))

    def commit(self, session: str, parent: str | None, *turns: Turn) -> None:
        with self._lock:
            record = self._held(session)
            record.check(parent, turns)
            self._written(session, lambda: self._journal.commit(record, parent, turns, self._owner.id))
            before = record.num_bytes
            record.commit(parent, turns)
            self._num_bytes += record.num_bytes - before
            self._evict()

    def mark(self, session: str, turns: Iterable[str], state: TurnState) -> None:
        with self._lock:
            record, marked = self._held(session), list(turns)
            record.mark(marked, state)
            self._note_soon(_Note(session, "mark", {"turns": marked, "state": state}))

    def drop(self, session: str, reason: str, num_tokens: int) -> None:
        with self._lock:
            record = self._held(session)
            record.drop(reason, num_tokens)
            self._note_soon(_Note(session, "drop", {"reason": reason, "num_tokens": num_tokens}))

    def seal(
        self,
        session: str,
        reward: float | None = None,
        status: str | None = None,
        turn_rewards: Sequence[float] = (),
    ) -> None:
        with self._lock:
            record = self._held(session)
            by_turn = record.by_turn(turn_rewards)
            self._note(_Note(session, "seal", {"reward": reward, "status": status, "turn_rewards": by_turn}))
            record.seal(reward, status, by_turn)

    def settle(self, session: str, disposition: Disposition, select: SelectConfig = DEFAULT) -> None:
        with self._lock:
            record = self._held(session)
            ended, selection = record.ending(disposition, select)
            self._note(_Note(session, "settle", settled(ended, selection)))
            record.settle(ended, selection)

    def release(self, sessions: Iterable[str]) -> list[str]:
        with self._lock:
            known = [session for session in dict.fromkeys(sessions) if self._is_ours(session)]
            if known:
                self._catch_up()
                self._journal.release(known, self._keep)
            for session in known:
                if (held := self._sessions.get(session)) is not None:
                    held.record.tree.release()
                self._let_go(session)
            return known

    def _note(self, note: _Note) -> None:
        self._written(note.session, lambda: self._journal.note(note.session, note.kind, note.record, self._owner.id))

    def _note_soon(self, note: _Note) -> None:
        """Write it, now or as soon as there is room."""
        try:
            self._note(note)
        except (OwnedElsewhere, UnknownSession):
            raise
        except TraceError as e:
            log.warning("session %s: a %s is kept until it can be written: %s", note.session, note.kind, e)
            self._unwritten.append(note)

    def _catch_up(self) -> None:
        """Write what could not be written. Raises TraceError while that is so."""
        while self._unwritten:
            note = self._unwritten[0]
            with suppress(OwnedElsewhere, UnknownSession):  # it is not ours to say any more
                self._journal.note(note.session, note.kind, note.record, self._owner.id)
            self._unwritten.popleft()

    def _written(self, session: str, write: Callable[[], None]) -> None:
        """Write, and know no more of a session that another store has by now."""
        self._catch_up()
        try:
            write()
        except OwnedElsewhere:
            self._let_go(session)
            raise

    # --- reading -----------------------------------------------------------------------------------------------------

    def find(self, key_digest: bytes) -> str | None:
        with self._lock:
            return self._journal.find(key_digest)

    def left(self) -> Mapping[str, float]:
        with self._lock:
            return self._journal.left()

    # --- in memory ---------------------------------------------------------------------------------------------------

    def _held(self, session: str) -> SessionRecord:
        """The session in memory, from the journal where it is not; it is then the last one used."""
        held = self._sessions.pop(session, None)
        if held is None:
            self._journal.take(session, self._owner.id)
            return self._hold(self._journal.load(session))
        held.used_s = time.monotonic()
        self._sessions[session] = held
        return held.record

    def _hold(self, record: SessionRecord) -> SessionRecord:
        self._sessions[record.id] = _Held(record)
        self._num_bytes += record.num_bytes
        self._evict()
        return record

    def _let_go(self, session: str) -> None:
        """Out of memory. The tree is not emptied: who has just asked for it may be reading."""
        if (held := self._sessions.pop(session, None)) is not None:
            self._num_bytes -= held.record.num_bytes

    def _evict(self) -> None:
        """Make room; the session that was used last stays."""
        if self._num_bytes > self._memory_bytes:
            for session in self._evictable()[:-1]:
                self._let_go(session)
                if self._num_bytes <= self._memory_bytes:
                    return

    def _evictable(self) -> list[str]:
        """The sessions that the journal has all of, the longest unused first."""
        kept = {note.session for note in self._unwritten}
        return [session for session in self._sessions if session not in kept]

    def _is_ours(self, session: str) -> bool:
        try:
            self._journal.take(session, self._owner.id)
        except UnknownSession:
            return False
        return True

    # --- housekeeping ------------------------------------------------------------------------------------------------

    def _keep_house(self, journal: Journal) -> None:
        """Let go of what is idle, and write the log back, so that no commit has to wait for it."""
        with journal:
            while not self._closing.wait(_PERIOD_S):
                try:
                    if journal.num_wal_bytes() > _MOST_WAL_BYTES:
                        journal.checkpoint()
                    self._tidy()
                except TraceError as e:
                    log.warning("%s", e)
                except Exception:
                    log.exception("bug while keeping %s in order; it goes on", self.path)

    def _tidy(self) -> None:
        with self._lock:
            with suppress(TraceError):  # it was said
                self._catch_up()
                self.payloads.release(())
            oldest_s = time.monotonic() - self._idle_s
            for session in self._evictable():
                if self._sessions[session].used_s < oldest_s:
                    self._let_go(session)


class _Payloads:
    """Payloads in the journal, over its store's connection and lock."""

    def __init__(self, journal: Journal, lock: threading.RLock, owner: str) -> None:
        self._journal = journal
        self._lock = lock
        self._owner = owner
        self._leasing: set[Holder] = set()  # of this process alone; most requests lease nothing
        self._ended: set[Holder] = set()  # whose leases could not be ended yet

    def put(self, value: NDArray[Any], holder: Holder) -> Payload:
        payload = new_payload(value)
        with self._lock:
            self._journal.put(payload, value, holder, self._owner)
            self._note(holder)
        return payload

    def get(self, payload: Payload) -> NDArray[Any]:
        with self._lock:
            return self._journal.value(payload)

    def lease(self, payloads: Iterable[Payload], holder: Holder) -> None:
        with self._lock:
            self._journal.lease(payloads, holder, self._owner)
            self._note(holder)

    def release(self, holders: Iterable[Holder]) -> list[str]:
        with self._lock:
            self._ended.update(one for one in holders if one.outlives_process or one in self._leasing)
            try:
                freed = self._journal.end_leases(self._ended, self._owner) if self._ended else []
            except TraceError as e:
                log.warning("leases of %d holders are ended as soon as that can be written: %s", len(self._ended), e)
                return []
            self._leasing -= self._ended
            self._ended.clear()
            return freed

    def _note(self, holder: Holder) -> None:
        self._ended.discard(holder)
        if not holder.outlives_process:
            self._leasing.add(holder)
