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
