"""What was written of one session, row by row: what cannot be read is told of, and the rest stands."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stenograph.traces.recovery import Event, Row
from stenograph.traces.written import Shared, WrittenTurn

log = logging.getLogger(__name__)


class Rows:
    """Those of the session that has this number in the database at `path`."""

    def __init__(self, path: Path, connection: sqlite3.Connection, session: int) -> None:
        self._path = path
        self._connection = connection
        self._session = session

    def turns(self) -> Iterator[Row]:
        for number in self._numbers("turns"):
            try:
                yield _row(number, self._one(_SELECT_TURN, number, self._session))
            except (sqlite3.Error, UnicodeError, TypeError) as e:
                yield Row(number, None, damage=f"it cannot be read ({e})", num_sampled=self._num_sampled(number))

    def _num_sampled(self, turn: int) -> int:
        """How many tokens a turn that cannot be read has sampled, where at least that can be told."""
        with suppress(sqlite3.Error, TypeError):  # a blob's length stands at its row's beginning
            return self._one("SELECT length(output_ids) FROM turns WHERE number = ?", turn)[0] // 4
        return 0

    def events(self) -> Iterator[Event]:
        for number in self._numbers("events"):
            try:
                yield Event(number, *self._one(_SELECT_EVENT, number, self._session))
            except (sqlite3.Error, UnicodeError, TypeError) as e:
                yield Event(number, "", "", damage=f"it cannot be read ({e})")

    def _numbers(self, place: str) -> list[int]:
        """Of what a session has in a table, in order; where its index is damaged, as far as the table can be read."""
        try:
            found = self._run(f"SELECT number FROM {place} WHERE session = ? ORDER BY number", self._session)
            return [number for (number,) in found]
        except sqlite3.DatabaseError as e:
            log.warning("%s: the index of its %s is damaged (%s); all of them are read instead", self._path, place, e)
        numbers: list[int] = []
        try:
            for (number,) in self._run(f"SELECT number FROM {place} NOT INDEXED WHERE session = ?", self._session):
                numbers.append(number)
        except sqlite3.DatabaseError as e:
            log.warning("%s: %s after number %s are lost (%s)", self._path, place, numbers[-1] if numbers else 0, e)
        return numbers

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    def _one(self, statement: str, *values: Any) -> Any:
        return self._run(statement, *values).fetchone()


_SELECT_TURN = """SELECT
    id, parent, call, shared_turn, shared_tokens, context_ids, output_ids, rollout_logprobs, record, checksum
FROM turns WHERE number = ? AND session = ?"""
_SELECT_EVENT = "SELECT kind, record, checksum FROM events WHERE number = ? AND session = ?"


def _row(number: int, found: Sequence[Any] | None) -> Row:
    """Raises TypeError where that is no turn."""
    if found is None:
        raise TypeError("it is in the index and not in the table")
    id, parent, call, shared_turn, shared_tokens, context_ids, output_ids, logprobs, record, checksum = found
    arrays = (context_ids, output_ids, logprobs)
    if not all(isinstance(one, bytes) for one in arrays) or not all(isinstance(one, str) for one in (id, call, record)):
        raise TypeError("its columns are not of the types that they were")
    shared = Shared(shared_turn, shared_tokens) if shared_turn is not None else None
    return Row(number, WrittenTurn(id, parent, call, shared, *arrays, record.encode()), checksum)
