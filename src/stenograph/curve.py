"""The reward curve of a run, as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any


def draw(steps: Sequence[dict[str, Any]], title: str) -> bytes:
    """A PNG: mean reward by step, held-out success beside it where it was measured."""
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
    axes.set(xlabel="step", ylabel="mean reward", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
