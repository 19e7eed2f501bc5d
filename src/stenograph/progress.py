"""What a person sees of a run: on a terminal a live panel, elsewhere a line per step; all of it on stderr."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text


class Progress:
    """A Watcher of the training loop. `with Progress(steps) as progress`; `rows` are those of a run that is resumed."""

    def __init__(self, num_steps: int, console: Console | None = None, rows: Sequence[dict[str, Any]] = ()) -> None:
        self.console = console or Console(stderr=True, markup=False)
        self._num_steps = num_steps
        self._started = time.monotonic()
        self._phase = "starting"
        self._phase_started = self._started
        self._running = 0
        self._rows = list(rows)
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4)

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def phase(self, name: str) -> None:
        self._phase, self._phase_started = name, time.monotonic()

    def running(self, num_rollouts: int) -> None:
        self._running = num_rollouts

    def step(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if not self.console.is_terminal:
            self.console.print(_line(row, self._left()), soft_wrap=True)

    def _render(self) -> Table:
        now = time.monotonic()
        grid = Table.grid(padding=(0, 2))
        trained = [row for row in self._rows if "reward_mean" in row]
        head = f"step {len(trained)}/{self._num_steps}  {self._phase} {now - self._phase_started:.0f} s"
        head += f"  rollouts running {self._running}  {_clock(now - self._started)} so far, {self._left()}"
        grid.add_row(Text(head, style="bold"))
        for row in self._rows[-12:]:
            grid.add_row(_line(row, ""))
        return grid

    def _left(self) -> str:
        times = [row["seconds"] for row in self._rows if "seconds" in row]
        if not times:
            return "time left unknown"
        left = self._num_steps - len(times)
        return f"about {_clock(left * sum(times) / len(times))} left"


def _line(row: dict[str, Any], left: str) -> str:
    if "eval_reward_mean" in row:
        mean, spread = row["eval_reward_mean"], row["eval_reward_stderr"]
        if mean is None or math.isnan(mean):  # None: read back from JSON, which has no nan
            return f"step {row['step']:>4}  held out: no attempt was scored"
        return f"step {row['step']:>4}  held out {mean:.3f} ± {spread:.3f}"
    rate = row["num_sampled_tokens"] / max(row["seconds"], 1e-9)
    shown = f"step {row['step']:>4}  reward {row['reward_mean']:.3f} {_bar(row['reward_mean'])}"
    if row.get("turn_reward_mean"):
        shown += f"  turns {row['turn_reward_mean']:+.3f}"
    if row.get("is_warmup"):
        shown += "  warm-up of the critic"
    return f"{shown}  {row['num_sampled_tokens']} tokens, {rate:.0f}/s, {row['seconds']:.0f} s  {left}".rstrip()


def _bar(reward: float) -> str:
    filled = round(10 * min(max(reward, 0.0), 1.0))
    return "█" * filled + "·" * (10 - filled)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def closing(console: Console, summary: dict[str, Any], run: str) -> None:
    """The end of a run: its figures, its curve, and where to look next."""
    table = Table("", "value", title="the run")
    for name in ("status", "steps", "policy_version", "reward_first", "reward_last", "seconds"):
        value = summary[name]
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    for name in ("sampled", "trained"):
        table.add_row(f"tokens {name}", str(summary["ledger"][name]))
    console.print(table)
    console.print(f"curve    {run}/curve.png", soft_wrap=True)
    console.print(f"record   {run}", soft_wrap=True)
    console.print(f"inspect  steno inspect {run}", soft_wrap=True)
