"""Who is at work on a database: an owner has a file locked for as long as its process lives, however that ends."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

from stenograph.errors import OwnedElsewhere, TraceError, UnknownSession, boundary


class Owner:
    """One store's claim to be at work on the database at `path`. Close it, or end the process."""

    def __init__(self, path: Path) -> None:
        self.id = secrets.token_hex(8)
        self._file = _file(path, self.id)
        with boundary(TraceError, f"lock {self._file}"):
            self._descriptor = os.open(self._file, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        self._file.unlink(missing_ok=True)
        os.close(self._descriptor)


class Owners:
    """Who is at work and who has which session, over a connection whose owner begins and ends the transactions."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path

    def enrol(self, owner: str, address: str) -> None:
        self._run("INSERT INTO owners VALUES (?, ?)", owner, address)

    def gone(self) -> list[str]:
        """Those that are not at work any more; the sockets that they left are removed."""
        gone = []
        for owner, address in self._run("SELECT id, address FROM owners").fetchall():
            if not is_at_work(self._path, owner):
                remove_socket(address)
                gone.append(owner)
        return gone

    def retire(self, owner: str) -> None:
        self._run("DELETE FROM owners WHERE id = ?", owner)

    def is_free(self, session: str, owner: str) -> bool:
        """Whether a session is there to be taken by `owner`; False where that has it already.

        Raises UnknownSession where it is not there or was released, OwnedElsewhere where one that is at work has it.
        """
        _, holder, address = self._holder(session)
        if holder == owner:
            return False
        if address is not None and is_at_work(self._path, holder):
            raise OwnedElsewhere(session, holder, address)
        return True

    def give(self, session: str, owner: str) -> None:
        self._run("UPDATE sessions SET owner = ? WHERE id = ?", owner, session)

    def number(self, session: str, owner: str | None) -> int:
        """The number of a session that is `owner`'s. Raises as `is_free` does."""
        number, holder, address = self._holder(session)
        if holder != owner:
            raise OwnedElsewhere(session, holder, address or "")
        return number

    def left(self) -> list[str]:
        """Sessions that are neither released nor sealed and that nobody has who is at work."""
        return [id for (id,) in self._run(_LEFT)]

    def _holder(self, session: str) -> tuple[int, Any, str | None]:
        """The number of a session, its owner, and the address of that one where it is known."""
        found = self._run(_HOLDER, session).fetchone()
        if found is None or found[0] is not None:
            raise UnknownSession(session)
        return found[1:]

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)


_OWNED = "FROM sessions LEFT JOIN owners ON owners.id = sessions.owner"
_HOLDER = f"SELECT released_s, number, owner, address {_OWNED} WHERE sessions.id = ?"
_LEFT = f"""SELECT sessions.id {_OWNED} WHERE released_s IS NULL AND owners.id IS NULL
AND NOT EXISTS (SELECT 1 FROM events WHERE session = sessions.number AND kind = 'seal')"""


def is_at_work(path: Path, owner: str) -> bool:
    """Whether an owner of the database at `path` lives; what one that does not left behind is removed."""
    file = _file(path, owner)
    try:
        descriptor = os.open(file, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        file.unlink(missing_ok=True)
        return False
    finally:
        os.close(descriptor)


def remove_socket(address: str) -> None:
    """Remove the socket, and its folder, at which a process that was killed was reached."""
    path = Path(address)
    with suppress(OSError):
        # A database that came from elsewhere may name anything: of a copy, what is at work on the original.
        if path.is_socket() and _is_left(address):
            path.unlink()
            path.parent.rmdir()


def _is_left(address: str) -> bool:
    """Whether nobody listens at a Unix socket any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)  # one that is busy, or stands still, is there
        try:
            asking.connect(address)
        except ConnectionRefusedError:
            return True
    return False


def _file(path: Path, owner: str) -> Path:
    return path.with_name(f"{path.name}-{owner}.lock")
