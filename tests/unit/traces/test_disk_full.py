"""Where the disk has no room, a turn is not committed, what was committed stays, and no token is unaccounted for."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from stenograph.errors import TraceError
from stenograph.traces.payloads import Holder
from stenograph.traces.session import Disposition, Opening
from stenograph.traces.sqlite import SqliteTraceStore
from support.random_sessions import everything
from support.turns import make_turn, user


@contextmanager
def full(store: SqliteTraceStore) -> Iterator[None]:
    """SQLite refuses any further page, and those that there are have no room left."""
    connection = store._journal._connection
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {num_pages}")
    store.open(Opening("filler"))
    num_bytes = 2000
    while num_bytes > 10:
        try:
            store.seal("filler", 0, "x" * num_bytes)
        except TraceError:
            num_bytes //= 2
    yield
    with suppress(sqlite3.ProgrammingError):  # where it was closed meanwhile
        connection.execute(f"PRAGMA max_page_count = {2**30}")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteTraceStore]:
    with closing(SqliteTraceStore(tmp_path / "traces.db")) as store:
        store.open(Opening("s"))
        yield store


def test_what_was_committed_stays_and_the_session_goes_on_when_there_is_room(
    store: SqliteTraceStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_turn([1], [2, 3], asked=[user("a")], said="b")
    store.commit("s", None, first)
    with full(store):
        before = everything(store, "s")
        siblings = [make_turn(range(5000), [4]), make_turn(range(5000), [5])]
        for _ in range(3):
            with pytest.raises(TraceError, match=r"full.*is the disk full or the file damaged\?$") as told:
                store.commit("s", first.id, *siblings)
            assert "\n" not in str(told.value)
        assert everything(store, "s") == before
        for refused in (lambda: store.seal("s"), lambda: store.settle("s", Disposition("trained"))):
            with pytest.raises(TraceError, match="full"):
                refused()
        assert everything(store, "s") == before
    store.commit("s", first.id, *siblings)
    after = everything(store, "s")
    assert len(after["paths"]) == 3
    store.close()
    with closing(SqliteTraceStore(tmp_path / "traces.db")) as store:
        assert everything(store, "s") == after
    assert caplog.records == []


def test_tokens_that_were_sampled_in_vain_are_noted_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where memory is short meanwhile: what the disk does not have yet stays in it."""
    path = tmp_path / "traces.db"
    with closing(SqliteTraceStore(path, memory_bytes=0, idle_s=0.001)) as store:
        store.open(Opening("s"))
        turn = make_turn([1], [2, 3])
        store.commit("s", None, turn)
        with full(store):
            store.drop("s", "commit_failed", 40)
            store.drop("s", "commit_failed", 2)
            store.mark("s", [turn.id], "delivered")
            kept = [record for record in caplog.records if "is kept until it can be written" in record.getMessage()]
            assert [record.levelno for record in kept] == [logging.WARNING] * 3
            assert store.get("filler").state == "sealed"  # and with it in memory there is room for no other
            store._closing.wait(1.5)  # nor does it go for being idle
            ledger = store.ledger("s")
            assert (ledger.sampled, ledger.dropped, ledger.balanced) == (44, {"commit_failed": 42}, True)
            assert store.tree("s").state(turn.id) == "delivered"
        store.commit("s", turn.id, make_turn([4], [5]))
        before = everything(store, "s")
    with closing(SqliteTraceStore(path)) as store:
        assert everything(store, "s") == before


def test_what_is_kept_is_written_though_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "traces.db"
    with closing(SqliteTraceStore(path)) as store:
        store.open(Opening("s"))
        with full(store):
            store.drop("s", "aborted", 40)
        ledger = store.ledger("s")
    with closing(SqliteTraceStore(path)) as store:
        assert store.ledger("s") == ledger


def test_what_is_lost_at_the_end_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SqliteTraceStore(tmp_path / "traces.db")
    store.open(Opening("s"))
    with full(store):
        store.drop("s", "aborted", 40)
        store.close()
        assert "1 marks and drops are lost" in caplog.text


def test_leases_that_cannot_be_ended_are_when_that_can_be_written(
    store: SqliteTraceStore, caplog: pytest.LogCaptureFixture
) -> None:
    request = Holder("request", "1")
    payload = store.payloads.put(np.zeros(3, np.uint8), request)
    store._journal._connection.execute("PRAGMA query_only = ON")
    assert store.payloads.release([request]) == []
    assert "ended as soon as that can be written" in caplog.text
    store._journal._connection.execute("PRAGMA query_only = OFF")
    assert store.payloads.release(()) == [payload.id]
