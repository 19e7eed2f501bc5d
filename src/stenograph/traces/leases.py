"""Payloads and their leases as tables of a journal: a payload is a row while a lease on it is one."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stenograph.errors import TraceError
from stenograph.traces.payloads import Holder, freed
from stenograph.types import Payload


class Leases:
    """Over a connection whose owner begins and ends the transactions.

    `owner` is the store whose requests and samples they are: what is held for those is let go when it is gone.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def put(self, payload: Payload, value: NDArray[Any], holder: Holder, owner: str) -> None:
        data = value.astype(_written(payload), order="C", copy=False).tobytes()
        self._run("INSERT INTO payloads VALUES (?, ?, ?)", payload.id, data, zlib.crc32(data))
        self.take([payload], holder, owner)

    def get(self, payload: Payload) -> NDArray[Any]:
        """Raises TraceError where it was freed, or is not what was put."""
        found = self._run("SELECT data, checksum FROM payloads WHERE id = ?", payload.id).fetchone()
        if found is None:
            raise freed(payload)
        data, checksum = found
        if zlib.crc32(data) != checksum:
            raise TraceError(f"payload {payload.id} is not what was written (its checksum differs)")
        return np.frombuffer(data, _written(payload)).reshape(payload.shape)

    def take(self, payloads: Iterable[Payload], holder: Holder, owner: str) -> None:
        """Raises TraceError where one was freed."""
        for payload in payloads:
            if self._run("SELECT 1 FROM payloads WHERE id = ?", payload.id).fetchone() is None:
                raise freed(payload)
            self._run("INSERT OR IGNORE INTO leases VALUES (?, ?, ?, ?)", payload.id, *_key(holder, owner))

    def end(self, holders: Iterable[Holder], owner: str) -> list[str]:
        """End all leases of `holders`; the ids of what that freed."""
        ended = "DELETE FROM leases WHERE kind = ? AND holder = ? AND owner = ? RETURNING payload"
        return self._free(id for holder in holders for (id,) in self._run(ended, *_key(holder, owner)).fetchall())

    def end_with(self, owner: str) -> None:
        """End what was held for the requests and samples of an owner that is gone."""
        ended = self._run("DELETE FROM leases WHERE owner = ? RETURNING payload", owner).fetchall()
        self._free(id for (id,) in ended)

    def _free(self, payloads: Iterable[str]) -> list[str]:
        freed = "DELETE FROM payloads WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM leases WHERE payload = ?1)"
        return [id for id in dict.fromkeys(payloads) if self._run(freed, id).rowcount]

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)


def _key(holder: Holder, owner: str) -> tuple[str, str, str]:
    return holder.kind, holder.name, "" if holder.outlives_process else owner


def _written(payload: Payload) -> np.dtype[Any]:
    return np.dtype(payload.dtype).newbyteorder("<")
