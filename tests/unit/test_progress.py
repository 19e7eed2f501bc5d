"""What a person sees of a run is there whatever its rows hold."""

from __future__ import annotations

import io
import math

from rich.console import Console

from stenograph.progress import Progress


def test_an_evaluation_without_a_score_is_shown_before_and_after_it_was_read_back() -> None:
    row = {"step": 0, "eval_reward_mean": math.nan, "eval_reward_stderr": 0.0}
    console = Console(file=io.StringIO())
    progress = Progress(1, console, rows=[row | {"eval_reward_mean": None}])  # JSON has no nan
    progress.step(row)
    assert console.file.getvalue() == "step    0  held out: no attempt was scored\n"  # pyright: ignore[reportAttributeAccessIssue]
