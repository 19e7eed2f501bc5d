"""A run is shown as it stands on disk: brackets are text, a crash's last line is left out, damage is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from stenograph import cli, inspecting
from stenograph.errors import ConfigError

ROLLOUT = {"session": "s", "task_id": "a[/b]", "reward": 1.0, "status": "completed", "num_turns": 1}
SPAN = {"turn": "turn_1", "start": 1, "end": 2, "ended_by": "eos"}
ARRAYS: dict[str, Any] = {"ids": [1, 2], "loss_mask": [0, 1], "rollout_logprobs": [0.0, -1.0], "versions": [-1, 0]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name, row in [
        ("metrics.jsonl", {"step": 1}),
        ("rollouts.jsonl", ROLLOUT),
        ("sessions.jsonl", {**ROLLOUT, **ARRAYS, "turns": [SPAN]}),
    ]:
        (tmp_path / name).write_bytes(orjson.dumps(row) + b"\n" + b'{"cut sh')
    return tmp_path


def test_what_a_run_holds_is_text_and_no_markup(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for session in (None, "s"):
        cli.inspect(run, session=session)
        assert "a[/b]" in capsys.readouterr().out


def test_an_export_holds_whole_rows_alone(run: Path, tmp_path: Path) -> None:
    cli.export(run, tmp_path / "out.jsonl")
    (line,) = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert orjson.loads(line)["session"] == "s"


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
    branch = {**ARRAYS, "task_id": "t", "reward": 1.0, "turns": [SPAN]}
    rows = [{"session": name, **branch} for name in ("steno_ab1", "steno_ab1", "steno_cd2")]
    (run / "sessions.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    (run / "rollouts.jsonl").write_bytes(orjson.dumps({**ROLLOUT, "session": "steno_ef3"}) + b"\n")
    data, _ = inspecting.session(run, "steno_ab")
    assert [row["session"] for row in data] == ["steno_ab1"] * 2
    with pytest.raises(ConfigError, match="2 sessions begin so"):
        inspecting.session(run, "steno_")
    with pytest.raises(ConfigError, match="no branch of it was selected"):
        inspecting.session(run, "steno_ef3")
    with pytest.raises(ConfigError, match="lists some"):
        inspecting.session(run, "other")


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
