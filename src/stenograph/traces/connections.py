"""Connections to a journal's database; what SQLite and the disk refuse is an error of ours."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stenograph.errors import ConfigError, TraceError

BUSY_S = 10.0  # how long another process may write meanwhile


def num_wal_bytes(path: Path) -> int:
    try:
        return path.with_name(path.name + "-wal").stat().st_size
    except FileNotFoundError:
        return 0


def connect(address: str) -> sqlite3.Connection:
    """Transactions are ours to begin and end; the store's lock keeps threads apart."""
    return sqlite3.connect(address, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)


def write_ahead(connection: sqlite3.Connection) -> None:
    """Switch to a write-ahead log, for which SQLite itself does not wait while another process is at it."""
    end_s = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as e:
            if e.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end_s:
                raise
        time.sleep(0.01)


@contextmanager
def opening(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as e:
        told = "restore it from a copy, or choose another file (--store sqlite:PATH)"
        raise ConfigError(f"{path} cannot be opened as a journal: {e}; {told}") from e


@contextmanager
def refused(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as e:
        raise TraceError(f"{path}: {e}; is the disk full or the file damaged?") from e
