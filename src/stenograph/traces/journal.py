"""The record on disk, one SQLite database a run: what is written is only ever added to, until it is pruned."""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson
from numpy.typing import NDArray

from stenograph.errors import ConfigError, TraceError, UnknownSession, boundary
from stenograph.traces import schema
from stenograph.traces.connections import BUSY_S, connect, num_wal_bytes, opening, refused, write_ahead
from stenograph.traces.leases import Leases
from stenograph.traces.owners import Owners
from stenograph.traces.payloads import Holder
from stenograph.traces.recovery import SetAside, event_checksum, restore
from stenograph.traces.rows import Rows
from stenograph.traces.session import Opening, SessionRecord
from stenograph.traces.written import Shared, write
from stenograph.types import Payload, Turn

log = logging.getLogger(__name__)

_LONG_LOG = 2048  # pages
_REST_MS = 50  # for readers of what is to be written back


class Journal:
    """A connection to the database. Not thread-safe. Raises TraceError for whatever the disk or SQLite refuses.

    A commit that returns survives the end of this process at any instant; `synchronous = NORMAL` means that a power cut
    may take the last commits back, never a part of one.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._leases = Leases(connection)
        self._owners = Owners(connection, path)

    @classmethod
    def writing(cls, path: Path) -> Journal:
        """Open or create the database at `path`. Raises ConfigError where that cannot be."""
        with opening(path):
            path = path.resolve()  # whatever links lead there: what stands beside it says who is at work on it
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = connect(f"{path.as_uri()}?mode=rwc")
            try:
                schema.is_current(connection, path)  # before anything is changed of what may be another's
                write_ahead(connection)
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute("PRAGMA wal_autocheckpoint = 0")  # a thread of the store's does it
                schema.prepare(connection, path)
            except BaseException:
                connection.close()
                raise
            return cls(path, connection)

    @classmethod
    def reading(cls, path: Path) -> Journal:
        """Open a database that is there, to read. Raises ConfigError where it is not, or is no journal."""
        if not path.is_file():
            told = f"{path.parent} holds no {path.name}" if path.parent.is_dir() else f"{path.parent} is not a folder"
            raise ConfigError(f'{told}; give the folder of a run that was recorded (store.kind = "sqlite")')
        with opening(path):
            path = path.resolve()
            address = f"{path.as_uri()}?mode=ro"
            if not os.access(path.parent, os.W_OK) and not num_wal_bytes(path):
                address += "&immutable=1"  # SQLite cannot make the files that it wants beside it, and needs none
            connection = connect(address)
            try:
                is_current = schema.is_current(connection, path)
            except BaseException:
                connection.close()
                raise
            if is_current:
                return cls(path, connection)
            connection.close()
        return cls.writing(path)  # which brings it to this version

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    # --- whose it is -------------------------------------------------------------------------------------------------

    def begin(self, config: str, tokenizer: str) -> None:
        """Note under which configuration (TOML) what follows is recorded. `tokenizer` differs where its ids do.

        Raises ConfigError where what is there has ids of another.
        """
        with self._transaction():
            found = self._one("SELECT tokenizer FROM starts ORDER BY rowid DESC LIMIT 1")
            if found is not None and found[0] != tokenizer:
                told = f"{self.path} was recorded with another model's tokenizer"
                raise ConfigError(f"{told}; serve that model, or choose another file (--store sqlite:PATH)")
            self._run("INSERT INTO starts VALUES (?, ?, ?)", time.time(), config, tokenizer)

    def config(self) -> str | None:
        """The last configuration that was at work here, as TOML."""
        with refused(self.path):
            found = self._one("SELECT config FROM starts ORDER BY rowid DESC LIMIT 1")
            return None if found is None else found[0]

    # --- writing -----------------------------------------------------------------------------------------------------

    def open(self, opening: Opening, allowed: Iterable[str], owner: str | None) -> None:
        held = {"metadata": opening.metadata, "traced": opening.traced, "allowed": sorted(allowed)}
        held["ttl_s"] = opening.ttl_s if math.isfinite(opening.ttl_s) else None
        values = (opening.id, opening.key_digest, _dumps(held), time.time(), owner)
        with self._transaction():
            taken = self._one("SELECT 1 FROM sessions WHERE id = ?", opening.id)
            if taken is not None:
                raise TraceError(f"session {opening.id} is open already")
            self._run("INSERT INTO sessions (id, key_digest, opening, opened_s, owner) VALUES (?, ?, ?, ?, ?)", *values)

    def commit(self, record: SessionRecord, parent: str | None, turns: Sequence[Turn], owner: str | None) -> None:
        """Write siblings that `record` is about to have, all or none of them."""
        before = record.tree.turn(parent) if parent is not None else None
        shared = [record.tree.shared(turn, parent) for turn in turns]
        for n, turn in enumerate(turns[1:], 1):  # the tree has none of them yet, and what they share is not in it
            if len(turn.context_ids) and turn.context_ids is turns[0].context_ids:
                shared[n] = (turns[0].id, len(turn.context_ids))
        rows = [
            write(turn, before, turns[0].id, Shared(*one) if one is not None else None)
            for turn, one in zip(turns, shared, strict=True)
        ]
        with self._transaction():
            session = self._owners.number(record.id, owner)
            for row in rows:
                beside = (row.shared.turn, row.shared.num_tokens) if row.shared else (None, None)
                arrays = (row.context_ids, row.output_ids, row.rollout_logprobs)
                values = (session, row.id, row.parent, row.call, *beside, *arrays, row.record.decode(), row.checksum)
                self._run(_INSERT_TURN, *values)
            payloads = [turn.experts for turn in turns if turn.experts is not None]
            self._leases.take(payloads, Holder("session", record.id), owner or "")

    def note(self, session: str, kind: str, record: Mapping[str, Any], owner: str | None) -> None:
        """Write down what became of a session."""
        written = _dumps(record)
        with self._transaction():
            number = self._owners.number(session, owner)
            values = (number, kind, written, event_checksum(kind, written))
            self._run("INSERT INTO events (session, kind, record, checksum) VALUES (?, ?, ?, ?)", *values)

    def release(self, sessions: Sequence[str], keep: str) -> None:
        """Say that nobody needs the sessions any more, and delete what is not to be kept of all that were released.

        `keep` is "all", "none", or "last:N" for those that were released last.
        """
        now = time.time()
        with self._transaction():
            for session in sessions:
                self._run("UPDATE sessions SET released_s = ?, owner = NULL WHERE id = ?", now, session)
                with suppress(TraceError):  # of one whose opening is damaged turns may be left
                    if not self._opening(session)[0].traced:
                        self._delete("SELECT number FROM sessions WHERE id = ?", session)
            self._leases.end([Holder("session", session) for session in sessions], "")
            if keep != "all":
                num_kept = int(keep.removeprefix("last:")) if keep != "none" else 0
                gone = "SELECT number FROM sessions WHERE released_s IS NOT NULL"
                self._delete(f"{gone} ORDER BY released_s DESC, number DESC LIMIT -1 OFFSET ?", num_kept)

    def _delete(self, numbers: str, *values: Any) -> None:
        """Delete the sessions that a query gives, and all that hangs on their numbers: others will have those next."""
        for (number,) in self._run(numbers, *values).fetchall():
            for place in ("turns", "events"):
                held = f"SELECT number FROM {place} WHERE session = ?"
                self._run(f"DELETE FROM quarantined WHERE place = ? AND number IN ({held})", place, number)
                self._run(f"DELETE FROM {place} WHERE session = ?", number)
            self._run("DELETE FROM sessions WHERE number = ?", number)

    # --- payloads ----------------------------------------------------------------------------------------------------

    def put(self, payload: Payload, value: NDArray[Any], holder: Holder, owner: str) -> None:
        with self._transaction():
            self._leases.put(payload, value, holder, owner)

    def value(self, payload: Payload) -> NDArray[Any]:
        """Raises TraceError where it was freed."""
        with refused(self.path):
            return self._leases.get(payload)

    def lease(self, payloads: Iterable[Payload], holder: Holder, owner: str) -> None:
        """Lease all, or none: raises TraceError where one was freed."""
        with self._transaction():
            self._leases.take(payloads, holder, owner)

    def end_leases(self, holders: Iterable[Holder], owner: str) -> list[str]:
        with self._transaction():
            return self._leases.end(holders, owner)

    # --- the log -----------------------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Write the log back into the database, as far as nobody reads it.

        The log begins anew only where all of it is written back, and who writes all the while would never let that be:
        of a long one, writers wait for the rest.
        """
        with refused(self.path):
            _, num_pages, _ = self._one("PRAGMA wal_checkpoint(PASSIVE)")
            if num_pages > _LONG_LOG:
                self._run(f"PRAGMA busy_timeout = {_REST_MS}")  # readers may be long at it; then it is for next time
                self._run("PRAGMA wal_checkpoint(FULL)").fetchall()
                self._run(f"PRAGMA busy_timeout = {BUSY_S * 1000:.0f}")

    def num_wal_bytes(self) -> int:
        return num_wal_bytes(self.path)

    # --- owners ------------------------------------------------------------------------------------------------------

    def enrol(self, owner: str, address: str) -> None:
        """Say that `owner` is at work and where it is reached; forget those that are not any more."""
        with self._transaction():
            for other in self._owners.gone():
                self._owners.retire(other)
                self._leases.end_with(other)
            self._owners.enrol(owner, address)

    def retire(self, owner: str) -> None:
        """`owner` is gone, and what it had is anyone's."""
        with self._transaction():
            self._owners.retire(owner)
            self._leases.end_with(owner)

    def take(self, session: str, owner: str) -> None:
        """Make `session` this owner's.

        Raises UnknownSession where it is not there or was released, OwnedElsewhere where one that is at work has it.
        """
        with refused(self.path):
            if self._owners.is_free(session, owner):
                with self._transaction():
                    if self._owners.is_free(session, owner):
                        self._owners.give(session, owner)

    def left(self) -> dict[str, float]:
        """Sessions that are not sealed and that nobody at work has, with their time to live in seconds."""
        left = {}
        with refused(self.path):
            for session in self._owners.left():
                with suppress(TraceError):  # it cannot be read
                    left[session] = self._opening(session)[0].ttl_s
        return left

    # --- reading -----------------------------------------------------------------------------------------------------

    def sessions(self) -> list[str]:
        """All of them, oldest first, released ones too."""
        with refused(self.path):
            try:
                return [id for (id,) in self._run("SELECT id FROM sessions ORDER BY number")]
            except sqlite3.DatabaseError:  # the index has the ids too, of those whose place is damaged as well
                index = "sqlite_autoindex_sessions_1"
                return [id for (id,) in self._run(f"SELECT id FROM sessions INDEXED BY {index} ORDER BY number")]

    def find(self, key_digest: bytes) -> str | None:
        """The session that is not released and whose key has this digest."""
        with refused(self.path):
            found = self._one("SELECT id FROM sessions WHERE key_digest = ? AND released_s IS NULL", key_digest)
            return None if found is None else found[0]

    def load(self, session: str) -> SessionRecord:
        """Read a session. Turns that cannot be, and those that go on from them, are set aside and logged."""
        with self._snapshot():
            opening, allowed, number, released = self._opening(session)
            record = SessionRecord(opening, allowed, released=released)
            rows = Rows(self.path, self._connection, number)
            aside = restore(record, rows.turns(), rows.events())
        if aside:
            self._quarantine(session, aside)
        return record

    def _quarantine(self, session: str, aside: Sequence[SetAside]) -> None:
        """Say what was set aside, once: here and in the database."""
        with refused(self.path):
            known = set(self._run("SELECT place, number FROM quarantined"))
        new = [one for one in aside if (one.place, one.number) not in known]
        for one in new:
            log.warning("%s: %s of session %s is set aside: %s", self.path, one.name, session, one.reason)
        if new:
            with suppress(TraceError), self._transaction():  # of one that is only read, it is said again next time
                for one in new:
                    values = (one.place, one.number, one.reason, time.time())
                    self._run("INSERT INTO quarantined VALUES (?, ?, ?, ?)", *values)

    def _opening(self, session: str) -> tuple[Opening, list[str], int, bool]:
        found = self._one("SELECT number, key_digest, opening, released_s FROM sessions WHERE id = ?", session)
        if found is None:
            raise UnknownSession(session)
        number, key_digest, written, released_s = found
        with boundary(TraceError, f"read what session {session} was opened with"):
            held = orjson.loads(written)
            ttl_s = held["ttl_s"] if held["ttl_s"] is not None else math.inf
            opening = Opening(session, held["metadata"], held["traced"], key_digest, ttl_s)
        return opening, held["allowed"], number, released_s is not None

    # --- SQLite ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with refused(self.path):
            self._run("BEGIN IMMEDIATE")
            try:
                yield
                self._run("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # where SQLite has not ended it by itself
                    self._run("ROLLBACK")
                raise

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Whatever others write meanwhile, what is read is of one moment."""
        with refused(self.path):
            self._run("BEGIN")
            try:
                yield
            finally:
                self._run("ROLLBACK")  # which does not mind damage, as COMMIT does

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    def _one(self, statement: str, *values: Any) -> Any:
        return self._connection.execute(statement, values).fetchone()


_INSERT_TURN = """INSERT INTO turns (
    session, id, parent, call, shared_turn, shared_tokens, context_ids, output_ids, rollout_logprobs, record, checksum
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""


def _dumps(value: object) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError as e:  # orjson's own errors too
        raise TraceError(f"what is to be recorded is no JSON: {e}") from e
