"""A run out of a file: what comes back gives the very same rows again, or is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from stenograph.errors import ConfigError, TraceError
from stenograph.interchange import files
from stenograph.interchange.checking import checked, difference
from stenograph.interchange.columns import Row
from stenograph.interchange.rows import session_rows
from stenograph.interchange.sessions import Session, session_of
from stenograph.traces.journal import Journal

Numbered = tuple[int, Row]  # a row and its number in the file, from 1


def import_run(path: Path, database: Path) -> dict[str, int]:
    """Make a journal that holds the sessions of a file, all of them or none. Returns counts.

    Raises ConfigError naming the file's row and what is wrong with it.
    """
    draft, is_new = database.with_name(database.name + ".part"), not database.parent.exists()
    counts = {"sessions": 0, "rows": 0}
    try:
        with Journal.writing(draft) as journal:
            for session in read_sessions(path):
                session.write(journal)
                counts["sessions"] += 1
                counts["rows"] += len(session.selection.branches)
        os.replace(draft, database)
    except BaseException:
        for left in database.parent.glob(f"{draft.name}*"):  # SQLite's own files beside it too
            left.unlink()
        if is_new and database.parent.exists():
            database.parent.rmdir()
        raise
    return counts


def read_sessions(path: Path) -> Iterator[Session]:
    """The sessions of a file, one in memory at a time. Raises ConfigError naming the row and what is wrong with it."""
    seen: set[str] = set()
    for name, group in groupby(_checked(path), key=lambda numbered: numbered[1]["session"]):
        rows = list(group)
        if name in seen:
            raise ConfigError(f"{path}, row {rows[0][0]}: session {name} again; put the rows of a session together")
        seen.add(name)
        yield _proven(path, rows)


def _checked(path: Path) -> Iterator[Numbered]:
    for number, row in enumerate(files.read(path), 1):
        try:
            yield number, checked(row)
        except ConfigError as e:
            raise ConfigError(f"{path}, row {number}: {e}") from None


def _proven(path: Path, rows: Sequence[Numbered]) -> Session:
    """The session of some rows, once it has given the same rows again."""
    try:
        session = session_of([row for _, row in rows])
        record = session.record()
        again = list(session_rows(record, session.read))
        record.tree.release()
    except (msgspec.ValidationError, TraceError, ValueError, TypeError) as e:  # of JSON too, TypeError where it is deep
        told = f"{path}, row {rows[0][0]}: its session cannot be put together: {e}"
        raise ConfigError(f"{told}; export the run again, or leave the session out") from None
    for (number, row), made in zip(rows, again, strict=True):
        if (column := difference(row, made)) is not None:
            told = f"{path}, row {number}: column {column} does not follow from the session's turns"
            raise ConfigError(f"{told}; export the run again, or leave the session out")
    return session
