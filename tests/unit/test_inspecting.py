"""A run is shown as it stands on disk: brackets are text, a crash's last line is left out, damage is one line."""

from __future__ import annotations

import itertools
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import orjson
import pytest

from stenograph import cli, inspecting
from stenograph.config import Config, SelectConfig
from stenograph.errors import ConfigError
from stenograph.interchange.exporting import export_run
from stenograph.rundir import open_journal, written
from stenograph.traces.session import Opening
from stenograph.traces.sqlite import SqliteTraceStore
from stenograph.types import Sampling
from support.turns import make_turn, user

ROLLOUT = {"session": "s", "task_id": "a[/b]", "reward": 1.0, "status": "completed", "num_turns": 1}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name, row in [("metrics.jsonl", {"step": 1}), ("rollouts.jsonl", ROLLOUT)]:
        (tmp_path / name).write_bytes(orjson.dumps(row) + b"\n" + b'{"cut sh')
    record(tmp_path, "s")
    return tmp_path


def record(run: Path, *sessions: str) -> None:
    """Sessions of two branches: a turn and its sibling, which the agent did not go on from, and what followed it."""
    with closing(SqliteTraceStore(run / "traces.db")) as store:
        store.begin(written(Config()), "tokenizer")
        for session in sessions:
            store.open(Opening(session, {"task_id": "a[/b]"}))
            turn = make_turn([1, 2], [3, 4], asked=[user("hello")], said="[hi]")
            store.commit(session, None, turn, make_turn([1, 2], [5], asked=[user("hello")]))
            store.commit(session, turn.id, make_turn([6], [7], asked=[user("and?")], sampling=Sampling(temperature=0)))
            store.seal(session, 1.0, "completed", [0.25, -1.0])


def test_what_a_run_holds_is_text_and_no_markup(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for session in (None, "s"):
        cli.inspect(run, session=session)
        assert "a[/b]" in capsys.readouterr().out


def test_an_export_holds_whole_rows_alone(run: Path, tmp_path: Path) -> None:
    cli.export(run, tmp_path / "out.jsonl")
    (line,) = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert (orjson.loads(line)["session"], orjson.loads(line)["loss_mask"]) == ("s", [0, 0, 1, 1, 0, 0])


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_a_damaged_file_is_named(run: Path, name: str) -> None:
    (run / name).write_bytes(b"{damaged\n")
    with pytest.raises(ConfigError, match=name):
        inspecting.overview(run)


def test_forks_are_summed_by_cause_with_the_first_of_each(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fork = {
        "turn": "turn_2",
        "parent_turn": "turn_1",
        "message": 3,
        "role": "assistant",
        "field": "reasoning",
        "before": "[why]",
        "after": "",
        "char": 0,
        "token": 9,
        "cause": "reasoning_stripped",
        "setting": "matching.reasoning_dropped",
        "rerendered": 40,
    }
    other = {**fork, "cause": "compaction", "rerendered": 5, "setting": None}
    rows = [
        {**ROLLOUT, "drift": [fork, {**fork, "before": "later"}], "accepted": {"ids_changed": 2}},
        {**ROLLOUT, "session": "t", "drift": [other], "accepted": {"ids_changed": 1}},
    ]
    (run / "rollouts.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    data, _ = inspecting.drift(run)
    stripped = data["causes"]["reasoning_stripped"]
    assert (stripped["forks"], stripped["rerendered"], stripped["first"]["before"]) == (2, 80, "[why]")
    assert (data["causes"]["compaction"]["forks"], data["causes"]["compaction"]["first"]["session"]) == (1, "t")
    assert data["accepted"] == {"ids_changed": 3}
    cli.inspect(run, drift=True)
    shown = capsys.readouterr().out
    assert "[why]" in shown
    assert "ids_changed" in shown


def test_a_session_is_found_by_the_beginning_of_its_id(run: Path) -> None:
    record(run, "steno_ab1", "steno_cd2")
    data, _ = inspecting.session(run, "steno_ab")
    assert [row["session"] for row in data] == ["steno_ab1"] * 2
    with pytest.raises(ConfigError, match="2 sessions begin so"):
        inspecting.session(run, "steno_")
    with pytest.raises(ConfigError, match="lists some"):
        inspecting.session(run, "other")


def test_a_session_whose_id_another_one_begins_with_is_found_by_all_of_its_own(run: Path) -> None:
    record(run, "again", "again_1")
    data, _ = inspecting.session(run, "again")
    assert {row["session"] for row in data} == {"again"}


def test_sessions_that_are_pruned_meanwhile_are_no_damage(run: Path) -> None:
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        (run / name).unlink()
    ended = threading.Event()

    def prune() -> None:
        with closing(SqliteTraceStore(run / "traces.db", keep="none")) as store:
            for n in itertools.count():
                if ended.is_set():
                    return
                store.open(Opening(f"short{n}"))
                store.release([f"short{n - 2}"])

    with ThreadPoolExecutor(1) as pool:
        pruning = pool.submit(prune)
        try:
            for _ in range(100):
                assert not any(row["error"] for row in inspecting.overview(run)[0]["last_rollouts"])
                with open_journal(run) as journal:
                    assert export_run(journal, run / "out.jsonl", "jsonl", SelectConfig())["left_out"] == 0
        finally:
            ended.set()
        pruning.result()


def test_all_branches_of_a_session_are_shown_with_what_is_trained(run: Path) -> None:
    rows, _ = inspecting.session(run, "s")
    assert [row["ids"].tolist() for row in rows] == [[1, 2, 5], [1, 2, 3, 4, 6, 7]]
    assert [row["loss_mask"].tolist() for row in rows] == [[0, 0, 0], [0, 0, 1, 1, 0, 0]]


def test_turns_are_shown_with_the_rewards_that_they_were_given(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    rows, _ = inspecting.session(run, "s")
    assert [[span["reward"] for span in row["turns"]] for row in rows] == [[-1.0], [0.25, None]]
    cli.inspect(run, session="s")
    shown = [line for line in capsys.readouterr().out.splitlines() if "mean logprob" in line]
    assert [line.partition(", reward ")[2].strip() for line in shown] == ["-1", "0.25", ""]
    data, _ = inspecting.turn(run, "s", 1, str)
    assert data["turn"]["reward"] == 0.25


def test_a_gateways_record_is_shown_as_a_runs_is(run: Path) -> None:
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        (run / name).unlink()
    data, _ = inspecting.overview(run)
    (row,) = data["last_rollouts"]
    assert row == {**ROLLOUT, "num_turns": 3, "error": None}
    data, _ = inspecting.ledger(run)
    assert data == {"sampled": 4, "trained": 0, "masked": {"greedy": 1}, "dropped": {}, "in_flight": 3}


def test_a_session_that_cannot_be_read_hides_no_other(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        (run / name).unlink()
    record(run, "other")
    with closing(sqlite3.connect(run / "traces.db")) as database, database:
        database.execute("UPDATE sessions SET opening = '{' WHERE id = 's'")
    damaged, other = inspecting.overview(run)[0]["last_rollouts"]
    assert (damaged["session"], damaged["status"], other["status"]) == ("s", "damaged", "completed")
    assert "could not read what session s was opened with" in damaged["error"]
    cli.export(run, run / "out.jsonl")
    assert orjson.loads(capsys.readouterr().out) == {
        "file": str(run / "out.jsonl"),
        "sessions": 1,
        "rows": 1,
        "left_out": 1,
    }


def test_the_ledger_and_the_forks_of_one_session_are_its_own(run: Path) -> None:
    (run / "rollouts.jsonl").unlink()
    record(run, "other")
    assert inspecting.ledger(run)[0]["sampled"] == 8
    assert inspecting.ledger(run, "ot")[0]["sampled"] == 4
    assert inspecting.drift(run, "ot")[0]["records"] == []
    with pytest.raises(ConfigError, match="no such session"):
        inspecting.ledger(run, "another")


def test_a_session_that_was_released_unsealed_says_so(run: Path) -> None:
    (run / "rollouts.jsonl").unlink()
    with closing(SqliteTraceStore(run / "traces.db")) as store:
        store.open(Opening("left"))
        store.release(["left"])
    assert inspecting.overview(run)[0]["last_rollouts"][-1]["status"] == "released"


def test_a_folder_without_a_journal_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no traces\.db"):
        inspecting.session(tmp_path, "s")


def test_what_failed_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = {**ROLLOUT, "session": "steno_" + "ab" * 16, "status": "error", "reward": None, "error": "it broke"}
    (run / "rollouts.jsonl").write_bytes(orjson.dumps(failed) + b"\n")
    (run / "metrics.jsonl").unlink()
    (run / "summary.json").write_bytes(orjson.dumps({"status": "failed", "error": "nothing to train on"}))
    data, _ = inspecting.overview(run)
    assert data["last_rollouts"][0]["error"] == "it broke"
    cli.inspect(run)
    shown = capsys.readouterr().out
    assert "nothing to train on" in " ".join(shown.split())
    assert "1 of them: it broke" in shown
    assert "…" not in shown  # ids can be copied
