"""A write-ahead log that is cut or damaged anywhere gives back the commits before that, each whole."""

from __future__ import annotations

import random
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from stenograph.errors import UnknownSession
from stenograph.traces.journal import Journal
from stenograph.traces.session import Opening
from stenograph.traces.sqlite import SqliteTraceStore
from stenograph.types import Turn
from support.turns import make_turn, user

NUM_COMMITS = 12


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Turn]]:
    """A database and its log as a process leaves them that is killed, and what was committed, in its order."""
    folder = tmp_path_factory.mktemp("killed")
    path = folder / "traces.db"
    turns: list[Turn] = []
    with closing(SqliteTraceStore(path)) as store:
        with Journal.writing(path) as journal:
            journal.checkpoint()
        store.open(Opening("s"))
        for n in range(NUM_COMMITS):
            turn = make_turn(range(n, n + 40 * n * n), range(n + 1), asked=[user(f"{n}")], said=f"said {n}")
            store.commit("s", turns[-1].id if turns and n % 3 else None, turn)
            turns.append(turn)
        left = folder / "left"
        left.mkdir()
        for name in ("traces.db", "traces.db-wal"):
            shutil.copy(folder / name, left / name)
    return left, turns


def loaded(left: Path, folder: Path, log: bytes) -> list[list[int]]:
    """The outputs of the turns that are there with `log`, and that nothing is wrong with them."""
    folder.mkdir(exist_ok=True)
    shutil.copy(left / "traces.db", folder / "traces.db")
    (folder / "traces.db-wal").write_bytes(log)
    try:
        with Journal.writing(folder / "traces.db") as journal:
            record = journal.load("s")
    except UnknownSession:
        return []
    finally:
        shutil.rmtree(folder)
    assert record.ledger().balanced
    assert record.ledger().dropped == {}
    return [turn.output_ids.tolist() for turn in record.tree.turns.values()]


def test_whatever_is_left_of_a_log_is_the_first_of_the_commits(
    killed: tuple[Path, list[Turn]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left, turns = killed
    whole = (left / "traces.db-wal").read_bytes()
    outputs = [turn.output_ids.tolist() for turn in turns]
    assert loaded(left, tmp_path / "at", whole) == outputs
    chance = random.Random(0)
    found = set()
    for _ in range(80):
        at = chance.randrange(len(whole))
        cut = whole[:at]
        flipped = cut + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :]
        for log in (cut, flipped, cut + bytes(len(whole) - at), cut + chance.randbytes(500)):
            there = loaded(left, tmp_path / "at", log)
            assert there == outputs[: len(there)]
            found.add(len(there))
    assert len(found) > NUM_COMMITS // 2
    assert caplog.records == []
