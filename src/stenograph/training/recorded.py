"""A batch as it was rolled out, written down before it is trained on: what is read back trains to the same bits."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import load_file, save_file

from stenograph.training.batch import SIGNALS
from stenograph.training.checkpoints import reading, whole_folder
from stenograph.types import Payload, Rollout, Routing, Sample, Task, TurnSpan

# What a sample carries per token; the table of signals says so, and another array of a sample is a line there.
_ARRAYS = [field.name for field in dataclasses.fields(Sample) if field.name in SIGNALS]


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """The rollouts of a training step, and those of their samples that it trains on.

    Experts are handles: who writes a batch down leases them for as long as it is kept.
    """

    step: int
    rollouts: tuple[Rollout, ...]
    samples: tuple[Sample, ...]
    engine: bytes  # the engine's random state after them

    @property
    def payloads(self) -> list[Payload]:
        return [routing.payload for sample in self.samples for routing in sample.experts]


def write_batch(path: Path, batch: RecordedBatch) -> None:
    """Raises CheckpointError where it cannot be written; `path` is then not there."""
    arrays = {name: np.concatenate([getattr(s, name) for s in batch.samples] or [_none(name)]) for name in _ARRAYS}
    lengths = np.array([len(sample.ids) for sample in batch.samples], np.int64)
    held = {
        "step": batch.step,
        "engine": base64.b64encode(batch.engine).decode(),
        "rollouts": [_values(rollout) | {"task": rollout.task.id} for rollout in batch.rollouts],
        "samples": [_values(sample, without=_ARRAYS) for sample in batch.samples],
    }
    with whole_folder(path) as folder:
        (folder / "batch.json").write_bytes(orjson.dumps(held))
        save_file({**arrays, "lengths": lengths}, folder / "samples.safetensors")


def read_batch(path: Path, tasks: Mapping[str, Task]) -> RecordedBatch:
    """`tasks` by their ids; one that is not there any more has no prompt, which nobody asks for after its rollout.

    Raises CheckpointError where it is damaged.
    """
    with _reading(path):
        held = orjson.loads((path / "batch.json").read_bytes())
        arrays = load_file(path / "samples.safetensors")
        ends = np.cumsum(arrays["lengths"])[:-1]
        parts = {name: np.split(arrays[name], ends) for name in _ARRAYS}
        samples = [
            _sample(values, {name: parts[name][n] for name in _ARRAYS}) for n, values in enumerate(held["samples"])
        ]
        rollouts = [_rollout(values, tasks) for values in held["rollouts"]]
        return RecordedBatch(held["step"], tuple(rollouts), tuple(samples), base64.b64decode(held["engine"]))


def sessions_of(path: Path) -> list[str]:
    """The sessions of the rollouts in a batch. Raises CheckpointError where it is damaged."""
    with _reading(path):
        return [rollout["session"] for rollout in orjson.loads((path / "batch.json").read_bytes())["rollouts"]]


def _reading(path: Path) -> AbstractContextManager[None]:
    return reading(path, f"begin a new run with --init-from {path.parents[1]}")


def _values(record: Rollout | Sample, without: list[str] | None = None) -> dict[str, Any]:
    """For JSON, which writes the records inside as their fields."""
    names = [field.name for field in dataclasses.fields(record) if field.name not in (without or ())]
    return {name: getattr(record, name) for name in names}


def _rollout(values: dict[str, Any], tasks: Mapping[str, Task]) -> Rollout:
    task = tasks.get(values["task"]) or Task(values["task"], "")
    return Rollout(**{**values, "task": task, "turn_rewards": tuple(values["turn_rewards"])})


def _sample(values: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> Sample:
    turns = tuple(TurnSpan(**turn) for turn in values["turns"])
    experts = tuple(
        Routing(Payload(**one["payload"] | {"shape": tuple(one["payload"]["shape"])}), one["end"])
        for one in values["experts"]
    )
    return Sample(**{**values, **arrays, "turns": turns, "experts": experts})


def _none(name: str) -> np.ndarray:
    return np.empty(0, SIGNALS[name].dtype)
