"""What a journal gives back is what it was given, whoever reads it, and whenever its session left memory."""

from __future__ import annotations

import itertools
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.config import SelectConfig
from stenograph.errors import ConfigError, OwnedElsewhere, TraceError, UnknownSession
from stenograph.traces.journal import Journal
from stenograph.traces.session import Disposition, Opening
from stenograph.traces.sqlite import SqliteTraceStore
from stenograph.types import Message
from support.random_sessions import everything, fill
from support.turns import asking, make_turn, user


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traces.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteTraceStore]:
    with closing(SqliteTraceStore(path)) as store:
        yield store


def count(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


@given(st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_a_session_is_the_same_for_the_next_process(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    path = tmp_path_factory.mktemp("journal") / "traces.db"
    with closing(SqliteTraceStore(path)) as store:
        for session in ("s", "t"):
            fill(store, session, random.Random(f"{seed} {session}"))
        before = {session: everything(store, session) for session in ("s", "t")}
    with closing(SqliteTraceStore(path)) as store:
        assert store.find(b"s") == "s"
        assert {session: everything(store, session) for session in ("s", "t")} == before


@given(st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_a_session_that_leaves_memory_between_any_two_calls_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Two sessions in turns, and room for none: each call reads its session anew."""
    path = tmp_path_factory.mktemp("journal") / "traces.db"
    with closing(SqliteTraceStore(path, memory_bytes=0)) as store:
        threads = [
            threading.Thread(target=fill, args=(store, session, random.Random(f"{seed} {session}")))
            for session in ("s", "t")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        evicted = {session: everything(store, session) for session in ("s", "t")}
    with closing(SqliteTraceStore(path)) as store:
        assert {session: everything(store, session) for session in ("s", "t")} == evicted
        assert all(ledger.balanced for ledger in map(store.ledger, ("s", "t")))


def test_siblings_share_their_prompt_on_disk_too(store: SqliteTraceStore, path: Path) -> None:
    store.open(Opening("s"))
    prompt = make_turn(range(5000), [1])
    others = [replace(make_turn([], [n]), context_ids=prompt.context_ids) for n in range(2, 20)]
    store.commit("s", None, prompt, *others)
    follows = make_turn([*range(5000), 99], [1])
    store.commit("s", None, follows)
    with closing(sqlite3.connect(path)) as connection:
        lengths = [n for (n,) in connection.execute("SELECT length(context_ids) FROM turns ORDER BY number")]
    assert lengths == [4 * 5000, *[0] * 18, 4]
    with Journal.reading(path) as journal:
        tree = journal.load("s").tree
    for turn in (prompt, *others, follows):
        assert tree.path_ids(turn.id).tolist() == [*turn.context_ids, *turn.output_ids]


def test_a_context_in_common_is_written_once_whatever_comes_between(store: SqliteTraceStore, path: Path) -> None:
    """A turn that its parent's ids were not kept for finds its beginning from the root, one that was below them."""
    store.open(Opening("s"))
    system = list(range(100, 400))
    first = make_turn([*system, 1], [2], asked=[user("a")], said="b")
    store.commit("s", None, first)
    kept = make_turn([*system, 3], [4], asked=[user("c")])
    again = make_turn([*system, 3, 4], [5], asked=[user("c")])
    anew = replace(make_turn([*system, 9], [6], asked=[user("d")]), extends=False)
    for turn in (kept, again, anew):
        store.commit("s", first.id, turn)
    with Journal.reading(path) as journal:
        tree = journal.load("s").tree
    for turn in (kept, again):
        assert tree.path_ids(turn.id).tolist() == [*system, 1, 2, *turn.context_ids, *turn.output_ids]
    assert tree.path_ids(anew.id).tolist() == [*system, 9, 6]
    assert [tree.node(turn.id).start for turn in (kept, again)] == [302 + 301, 302 + 302]


def test_what_was_selected_at_first_is_what_samples_are_made_from(path: Path) -> None:
    with closing(SqliteTraceStore(path)) as store:
        store.open(Opening("s"))
        root = make_turn([1], [2, 3])
        store.commit("s", None, root, replace(make_turn([1], [9]), role="title"))
        store.commit("s", root.id, make_turn([4], [5] * 10))
        store.settle("s", Disposition("trained"), SelectConfig(max_tokens=6, overlong="truncate"))
        before = everything(store, "s")
    with closing(SqliteTraceStore(path)) as store:
        assert everything(store, "s") == before
        store.settle("s", Disposition("dropped", "step_skipped"))  # there is nothing left
        assert store.ledger("s") == before["ledger"]
        assert [len(sample.ids) for sample in store.samples("s")] == [6]


def test_a_repeat_is_known_after_a_restart_whatever_ids_it_has(path: Path) -> None:
    """An empty id is another message than one that has none."""
    said = Message("tool", "result", tool_call_id="", name="", joints=(3,))
    turn = make_turn([1], [2], asked=[user("a"), said], said="b")
    with closing(SqliteTraceStore(path)) as store:
        store.open(Opening("s"))
        store.commit("s", None, turn)
    with closing(SqliteTraceStore(path)) as store:
        asked = replace(asking("a"), messages=(user("a"), said, Message("assistant", "b"), user("c")))
        match = store.match("s", asked)
        assert match is not None
        assert (match.turn, match.num_known) == (turn.id, 3)


# --- what is released --------------------------------------------------------------------------------------------


def test_what_nobody_settled_is_released_in_the_journal(store: SqliteTraceStore, path: Path) -> None:
    store.open(Opening("s"))
    store.commit("s", None, make_turn([1], [2, 3]))
    assert store.release(["s", "s", "other"]) == ["s"]
    with Journal.reading(path) as journal:
        ledger = journal.load("s").ledger()
    assert (ledger.dropped, ledger.in_flight, ledger.balanced) == ({"released": 2}, 0, True)
    for refused in (lambda: store.commit("s", None, make_turn([1], [2])), lambda: store.tree("s")):
        with pytest.raises(UnknownSession):
            refused()
    assert store.find(b"") is None
    assert store.release(["s"]) == []


def test_of_an_untraced_session_nothing_stays(store: SqliteTraceStore, path: Path) -> None:
    store.open(Opening("s", traced=False))
    assert store.release(["s"]) == ["s"]
    assert count(path, "sessions") == 0


@pytest.mark.parametrize("traced", [False, True])
def test_a_session_begins_with_nothing_of_one_that_was_deleted(path: Path, traced: bool) -> None:
    """A database gives the last number that is free to the next session."""
    with closing(SqliteTraceStore(path, keep="none")) as store:
        store.open(Opening("gone", traced=traced))
        store.seal("gone", 7.0, "completed")
        store.release(["gone"])
        store.open(Opening("s"))
        before = everything(store, "s")
    assert count(path, "events") == 0
    with closing(SqliteTraceStore(path)) as store:
        assert everything(store, "s") == before
        assert (store.get("s").state, store.get("s").reward) == ("open", None)


def test_a_session_whose_opening_is_damaged_is_released_beside_others(path: Path) -> None:
    with closing(SqliteTraceStore(path)) as store:
        for session in ("s", "t"):
            store.open(Opening(session))
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE sessions SET opening = 'torn' WHERE id = 's'")
        assert store.release(["s", "t"]) == ["s", "t"]
        assert count(path, "sessions") == 2


@pytest.mark.parametrize(("keep", "kept"), [("all", [0, 1, 2, 3, 4]), ("none", []), ("last:2", [3, 4])])
def test_released_sessions_are_kept_as_the_setting_says(path: Path, keep: str, kept: list[int]) -> None:
    with closing(SqliteTraceStore(path, keep=keep)) as store:
        for n in range(5):
            fill(store, f"s{n}", random.Random(n), ends=False)
        fill(store, "open", random.Random(9), ends=False)
        before = everything(store, "open")
        assert store.release(["s0"]) == ["s0"]
        assert store.release(["s1", "s2", "s3", "s4"]) == ["s1", "s2", "s3", "s4"]
        with Journal.reading(path) as journal:
            assert journal.sessions() == [*(f"s{n}" for n in kept), "open"]
        with closing(sqlite3.connect(path)) as connection:
            for table in ("turns", "events"):
                held = {n for (n,) in connection.execute(f"SELECT session FROM {table}")}
                assert held == {n for (n,) in connection.execute("SELECT number FROM sessions")}
        assert everything(store, "open") == before


def test_a_file_that_keeps_nothing_does_not_grow(path: Path) -> None:
    with closing(SqliteTraceStore(path, keep="last:1")) as store:
        sizes = []
        for n in range(60):
            store.open(Opening(f"s{n}"))
            store.commit(f"s{n}", None, make_turn(range(3000), range(100)))
            store.release([f"s{n}"])
            with Journal.writing(path) as journal:
                journal.checkpoint()
            sizes.append(path.stat().st_size)
    assert max(sizes[5:]) <= sizes[5] + 2 * 4096


def test_the_log_begins_anew_though_it_is_written_all_the_while(path: Path) -> None:
    ended = threading.Event()

    def write() -> None:
        with Journal.writing(path) as journal:
            for n in itertools.count():
                if ended.wait(0.001):
                    return
                journal.open(Opening(f"s{n}", {"text": "x" * 20_000}), (), None)

    with Journal.writing(path) as journal, ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            for _ in range(40):
                time.sleep(0.1)
                journal.checkpoint()
        finally:
            ended.set()
        writing.result()
        assert journal.num_wal_bytes() < path.stat().st_size / 2


# --- in memory -----------------------------------------------------------------------------------------------------


def test_a_tree_in_a_readers_hand_stays_whole_when_its_session_leaves_memory(path: Path) -> None:
    with closing(SqliteTraceStore(path, memory_bytes=0)) as store:
        store.open(Opening("s"))
        turn = make_turn([1, 2], [3])
        store.commit("s", None, turn)
        tree = store.tree("s")
        store.open(Opening("t"))  # for which there is no room
        assert store.tree("s") is not tree
        assert tree.path_ids(turn.id).tolist() == [1, 2, 3]
        store.commit("s", turn.id, make_turn([4], [5]))
        assert len(store.tree("s").turns) == 2


def test_a_session_that_is_idle_leaves_memory(path: Path) -> None:
    with closing(SqliteTraceStore(path, idle_s=0.01)) as store:
        store.open(Opening("s"))
        tree = store.tree("s")
        for _ in range(100):
            if store.tree("s") is not tree:
                break
            store._closing.wait(0.05)  # asking keeps it in memory no longer than that
        else:
            raise AssertionError("it is still the same")


def test_many_threads_write_to_their_sessions_and_to_one_of_all(path: Path) -> None:
    with closing(SqliteTraceStore(path, memory_bytes=20_000)) as store:
        store.open(Opening("all"))
        failed: list[BaseException] = []

        def work(number: int) -> None:
            try:
                chance = random.Random(number)
                fill(store, f"s{number}", chance)
                for n in range(20):
                    store.commit("all", None, make_turn([number, n], [n] * (n + 1)))
                    store.drop("all", "aborted", 1)
            except BaseException as e:
                failed.append(e)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        ledger = store.ledger("all")
        assert (ledger.balanced, ledger.sampled) == (True, 6 * (210 + 20))
        before = {f"s{n}": everything(store, f"s{n}") for n in range(6)} | {"all": everything(store, "all")}
    with closing(SqliteTraceStore(path)) as store:
        assert {name: everything(store, name) for name in before} == before


# --- who may -------------------------------------------------------------------------------------------------------


def test_a_session_has_one_owner_until_that_is_gone(path: Path) -> None:
    with closing(SqliteTraceStore(path)) as second:
        with closing(SqliteTraceStore(path, address="there")) as first:
            first.open(Opening("s"))
            with pytest.raises(OwnedElsewhere) as told:
                second.tree("s")
            assert told.value.address == "there"
            turn = make_turn([1], [2])
            first.commit("s", None, turn)
        second.commit("s", turn.id, make_turn([3], [4]))
        assert len(second.tree("s").turns) == 2


def test_a_reader_sees_a_session_as_it_was_at_one_moment(path: Path) -> None:
    """While another process writes: what is told of a turn is never there without it."""
    with closing(SqliteTraceStore(path)) as store, Journal.reading(path) as journal:
        store.open(Opening("s"))

        def write() -> None:
            for _ in range(150):
                store.commit("s", None, make_turn([1], [2, 3]))
                store.drop("s", "aborted", 2)

        writer = threading.Thread(target=write)
        writer.start()
        seen = set()
        while writer.is_alive():
            record = journal.load("s")
            num_turns, ledger = len(record.tree.turns), record.ledger()
            assert ledger.dropped.get("aborted", 0) in (2 * num_turns, 2 * num_turns - 2)
            seen.add(num_turns)
        assert len(seen) > 1


def test_one_that_is_killed_leaves_its_sessions_to_others(path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from stenograph.traces.session import Opening
from stenograph.traces.sqlite import SqliteTraceStore
from support.turns import make_turn
store = SqliteTraceStore(Path({str(path)!r}))
store.open(Opening("s"))
store.commit("s", None, make_turn([1], [2]))
store.open(Opening("sealed"))
store.commit("sealed", None, make_turn([1], [2]))
store.seal("sealed", 1.0, "completed", [0.25])
os.kill(os.getpid(), signal.SIGKILL)
"""
    folder = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r})\n{code}"])
    assert done.returncode == -9
    with closing(SqliteTraceStore(path)) as store:
        assert [turn.output_ids.tolist() for turn in store.tree("s").turns.values()] == [[2]]
        store.seal("s")
        store.seal("sealed")
        assert [span.reward for sample in store.samples("sealed") for span in sample.turns] == [0.25]
    assert list(path.parent.glob("*.lock")) == []


def test_an_id_is_opened_once(store: SqliteTraceStore) -> None:
    store.open(Opening("s"))
    with pytest.raises(TraceError, match="open already"):
        store.open(Opening("s"))


def test_another_tokenizer_is_refused(store: SqliteTraceStore, path: Path) -> None:
    store.begin("", "one")
    store.begin("", "one")
    with pytest.raises(ConfigError, match="another model's tokenizer"):
        store.begin("", "other")
