"""Whatever is damaged of a journal: what can be read is there, what cannot is set aside and said once."""

from __future__ import annotations

import logging
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from stenograph.errors import TraceError
from stenograph.traces.journal import Journal
from stenograph.traces.session import Disposition, Opening, SessionRecord
from stenograph.traces.sqlite import SqliteTraceStore
from stenograph.types import Turn
from support.random_sessions import everything
from support.turns import make_turn, user

Damage = Callable[[sqlite3.Connection], None]
PAGE = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traces.db"


@pytest.fixture
def turns(path: Path) -> list[Turn]:
    """A root, one that goes on from it, and one that goes on from that; then a root of its own."""
    made = [make_turn([n], [n, n + 1, n + 2], asked=[user(f"{n}")], said=f"said {n}") for n in (10, 20, 30, 40)]
    with closing(SqliteTraceStore(path)) as store:
        store.open(Opening("other"))
        store.open(Opening("s", {"task_id": "t"}))
        for turn, parent in zip(made, [None, made[0].id, made[1].id, None], strict=True):
            store.commit("s", parent, turn)
            store.mark("s", [turn.id], "delivered")
        store.commit("other", None, make_turn([1], [2]))
        store.drop("s", "aborted", 7)
        store.seal("s", 0.5, turn_rewards=[1.0, 2.0, 3.0, 4.0])
        store.settle("s", Disposition("trained"))
    return made


def load(path: Path) -> SessionRecord:
    with Journal.writing(path) as journal:
        return journal.load("s")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not any("\n" in line for line in lines)
    caplog.clear()
    return lines


def flipped(column: str, number: int = 2, table: str = "turns") -> Damage:
    """A bit of what is in a column."""

    def damage(connection: sqlite3.Connection) -> None:
        (held,) = connection.execute(f"SELECT {column} FROM {table} WHERE number = ?", (number,)).fetchone()
        match held:
            case int():
                other: object = held ^ 4
            case bytes():
                other = bytes([held[0] ^ 4]) + held[1:]
            case _:
                middle = len(held) // 2
                other = held[:middle] + chr(ord(held[middle]) ^ 4) + held[middle + 1 :]
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE number = ?", (other, number))

    return damage


def made(column: str, value: object) -> Damage:
    """A column of another type: a bit of a row's header says which it is."""
    return lambda connection: connection.execute(f"UPDATE turns SET {column} = ? WHERE number = 2", (value,)) and None


DAMAGES = {
    **{
        column: flipped(column)
        for column in ("id", "parent", "call", "context_ids", "output_ids", "rollout_logprobs", "record", "checksum")
    },
    "shared": made("shared_turn", "turn_1"),
    "text for a blob": made("output_ids", "twelve chars"),
    "number for a text": made("record", 7),
    "blob for a text": made("id", b"\xff"),
    "number for a blob": made("context_ids", 1.5),
    "no text": lambda connection: (
        connection.execute("UPDATE turns SET record = CAST(x'ff' AS TEXT) WHERE number = 2") and None
    ),
}


def change(path: Path, damage: Damage) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        damage(connection)
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_turn_is_set_aside_with_what_goes_on_from_it(
    path: Path, turns: list[Turn], damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    change(path, damage)
    record = load(path)
    assert list(record.tree.turns) == [turns[0].id, turns[3].id]
    ledger = record.ledger()
    assert (ledger.dropped, ledger.trained, ledger.balanced) == ({"quarantined": 6, "aborted": 7}, 6, True)
    assert ledger.sampled == 12 + 7
    lines = told(caplog)
    assert len(lines) == 2
    assert all(line.startswith(f"{path}: turn ") and "of session s is set aside: " in line for line in lines)
    assert [sample.ids.tolist() for sample in record.samples()] == [[10, 10, 11, 12], [40, 40, 41, 42]]
    assert [sample.turns[0].reward for sample in record.samples()] == [1.0, 4.0]  # each its own, as before
    assert load(path).ledger() == ledger
    assert told(caplog) == []  # it was said


@pytest.mark.parametrize("column", ["kind", "record", "checksum"])
@pytest.mark.parametrize("number", [1, 5, 6, 7])
def test_what_became_of_a_session_and_is_damaged_is_set_aside(
    path: Path, turns: list[Turn], column: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    change(path, flipped(column, number, "events"))
    record = load(path)
    assert list(record.tree.turns) == [turn.id for turn in turns]
    ledger = record.ledger()
    assert ledger.balanced
    assert record.tree.state(turns[0].id) == ("committed" if number == 1 else "delivered")
    assert ledger.dropped == ({} if number == 5 else {"aborted": 7})
    assert (record.state, record.reward) == (("open", None) if number == 6 else ("sealed", 0.5))
    assert ledger.trained == (0 if number == 7 else 12)
    (line,) = told(caplog)
    assert f"event number {number} of session s is set aside" in line
    load(path)
    assert told(caplog) == []


@pytest.mark.parametrize("column", ["opening"])
def test_a_session_whose_opening_is_damaged_is_one_clear_error(path: Path, turns: list[Turn], column: str) -> None:
    change(path, lambda connection: connection.execute("UPDATE sessions SET opening = '{' WHERE id = 's'") and None)
    with pytest.raises(TraceError, match="could not read what session s was opened with"):
        load(path)


def test_a_damaged_session_goes_on_from_what_is_left(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(SqliteTraceStore(path)) as store:
        store.open(Opening("s"))
        root, gone = make_turn([1], [2], asked=[user("a")], said="b"), make_turn([3], [4])
        store.commit("s", None, root)
        store.commit("s", root.id, gone)
    change(path, flipped("output_ids"))
    with closing(SqliteTraceStore(path)) as store:
        again = make_turn([3], [5])
        store.commit("s", root.id, again)
        before = everything(store, "s")
        assert before["paths"] == {root.id: [1, 2], again.id: [1, 2, 3, 5]}
        assert before["ledger"].dropped == {"quarantined": 1}
        with pytest.raises(TraceError, match="is not recorded"):
            store.commit("s", gone.id, make_turn([6], [7]))
    assert len(told(caplog)) == 1
    with closing(SqliteTraceStore(path)) as store:
        assert everything(store, "s") == before
    assert told(caplog) == []


def test_a_row_of_another_session_is_none_of_ours(path: Path, turns: list[Turn]) -> None:
    """A damaged session's number in the table, which its index does not have."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = 'CREATE INDEX turns_by_session ON turns (number)' WHERE 0")
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'turns_by_session'").fetchone()
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    raw = bytearray(path.read_bytes())
    page = memoryview(raw)[(root - 1) * PAGE : root * PAGE]
    at = bytes(page).rfind(b"\x03\x01\x01\x02\x04")  # a record of two one-byte integers: session 2, turn 4
    assert at > 0
    page[at + 4] = 5  # which is the other session's
    page.release()
    path.write_bytes(raw)
    assert [turn.id for turn in load(path).tree.turns.values()] == [turn.id for turn in turns[:3]]


# --- pages -------------------------------------------------------------------------------------------------------


@pytest.fixture
def large(path: Path) -> tuple[Path, list[Turn]]:
    """A session of turns that have pages of their own."""
    made = [make_turn(range(n, n + 3000), range(2000), asked=[user(f"{n}")]) for n in range(0, 40000, 4000)]
    with closing(SqliteTraceStore(path)) as store:
        store.open(Opening("s"))
        for turn in made:
            store.commit("s", None, turn)
            store.drop("s", "aborted", 1)
    return path, made


def pages(path: Path, kind: str) -> list[int]:
    """The numbers of the database's pages of a kind, from 1."""
    with closing(sqlite3.connect(path)) as connection:
        roots = dict(connection.execute("SELECT name, rootpage FROM sqlite_master"))
    raw = path.read_bytes()
    names = {0x0D: "leaf", 0x05: "interior", 0x0A: "index"}
    match kind:
        case "root":
            return [roots["turns"]]
        case "index":
            return [roots["turns_by_session"]]
        case "leaf":
            known = set(roots.values())
            kinds = {n: names.get(raw[(n - 1) * PAGE]) for n in range(2, len(raw) // PAGE + 1)}
            interior = raw[(roots["turns"] - 1) * PAGE]
            return [roots["turns"]] if interior == 0x0D else [n for n in kinds if kinds[n] == "leaf" and n not in known]
        case _:
            known = {n for other in ("root", "index", "leaf") for n in pages(path, other)} | set(roots.values())
            return [n for n in range(2, len(raw) // PAGE + 1) if n not in known]


@pytest.mark.parametrize("kind", ["leaf", "overflow", "index", "root"])
@pytest.mark.parametrize("how", ["zeros", "noise", "bit"])
@pytest.mark.parametrize("seed", range(3))
def test_of_a_damaged_page_the_rest_is_read(
    large: tuple[Path, list[Turn]], kind: str, how: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    path, turns = large
    chance = random.Random(f"{kind} {how} {seed}")
    number = chance.choice(pages(path, kind))
    raw = bytearray(path.read_bytes())
    start = (number - 1) * PAGE
    match how:
        case "zeros":
            raw[start : start + PAGE] = bytes(PAGE)
        case "noise":
            raw[start : start + PAGE] = chance.randbytes(PAGE)
        case _:
            raw[start + chance.randrange(PAGE)] ^= 1 << chance.randrange(8)
    path.write_bytes(raw)
    record = load(path)
    by_id = {turn.id: turn for turn in turns}
    for turn in record.tree.turns.values():  # nothing is there that was not written
        expected = by_id[turn.id]
        path_ids = record.tree.path_ids(turn.id).tolist()
        assert path_ids == [*expected.context_ids, *expected.output_ids]
        assert turn.rollout_logprobs.tolist() == expected.rollout_logprobs.tolist()
    assert record.ledger().balanced
    lost = len(turns) - len(record.tree.turns)
    if kind == "overflow":
        assert lost <= 1
    if lost:
        assert told(caplog)
    if kind in ("index", "overflow"):
        assert len(record.tree.turns) >= len(turns) - 1


def test_beside_a_damaged_page_of_sessions_the_others_are_read(path: Path) -> None:
    names = [f"s{n}" for n in range(200)]
    with closing(SqliteTraceStore(path)) as store:
        for name in names:
            store.open(Opening(name, {"task_id": "t" * 100}))
    raw = bytearray(path.read_bytes())
    at = raw.index(b"s100{")  # nowhere but in its row: the next column is the key's digest, which is empty
    start = at - at % PAGE
    raw[start : start + PAGE] = bytes(PAGE)
    path.write_bytes(raw)
    read = []
    with Journal.reading(path) as journal:
        assert journal.sessions() == names
        for name in names:
            with suppress(TraceError):
                read.append(journal.load(name).id)
    assert 150 < len(read) < 200
