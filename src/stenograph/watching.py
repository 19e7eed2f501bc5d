"""Who looks on while a run trains: each hears of every phase and every row, and changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from stenograph.rundir import RunDir


class Watcher(Protocol):
    """`phase` names what begins now ("done" at the end); `step` brings a row of metrics.jsonl."""

    def phase(self, name: str) -> None: ...

    def step(self, row: dict[str, Any]) -> None: ...


class Watchers:
    """Several, told in their order."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def phase(self, name: str) -> None:
        for watcher in self._watchers:
            watcher.phase(name)

    def step(self, row: dict[str, Any]) -> None:
        for watcher in self._watchers:
            watcher.step(row)


class Spans:
    """Where the time went: a row of `spans.jsonl` per phase, in OpenTelemetry's names."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._open: dict[str, Any] | None = None

    def phase(self, name: str) -> None:
        now = time.time_ns()
        if self._open is not None:
            self._run.append("spans.jsonl", [{**self._open, "end_time_unix_nano": now}])
        self._open = None if name == "done" else {"name": name, "start_time_unix_nano": now}

    def step(self, row: dict[str, Any]) -> None:
        """A row is no span."""


class Board:
    """Every number of a row as a TensorBoard scalar, in the run's `tb/`."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def phase(self, name: str) -> None:
        """A phase is no scalar."""

    def step(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, float(value), row["step"])


@contextmanager
def boards(run: RunDir) -> Iterator[list[Watcher]]:
    """A Board, closed at the end; none where the package tensorboard (the extra of that name) is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        yield []
        return
    with SummaryWriter(str(run.path / "tb")) as writer:
        yield [Board(writer)]
