"""The reward curve of a run, as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any


def draw(steps: Sequence[dict[str, Any]], title: str) -> bytes:
    """A PNG: mean reward by step, held-out success and what a critic explains beside it where they were measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    trained = [row for row in steps if row.get("reward_mean") is not None]
    held_out = [row for row in steps if row.get("eval_reward_mean") is not None]
    axes.plot([r["step"] for r in trained], [r["reward_mean"] for r in trained], marker="o", label="training reward")
    if held_out:
        xs, ys = [r["step"] for r in held_out], [r["eval_reward_mean"] for r in held_out]
        axes.plot(xs, ys, marker="s", linestyle="--", label="held out")
    explained = [row for row in trained if row.get("explained_variance") is not None]
    if explained:
        xs, ys = [r["step"] for r in explained], [r["explained_variance"] for r in explained]
        axes.plot(xs, ys, linestyle=":", label="explained variance of the critic")
        axes.set_ylim(bottom=max(-1.0, axes.get_ylim()[0]))  # a new critic explains less than nothing
    axes.set(xlabel="step", ylabel="mean reward", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
