"""Who is at work on a database: an owner has a file locked for as long as its process lives, however that ends."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from stenograph.errors import TraceError, boundary


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


def clear(address: str) -> None:
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
