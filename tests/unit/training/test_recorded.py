"""A batch that is written down and read back is the same batch, to the bit."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stenograph.errors import CheckpointError
from stenograph.training.batch import SIGNALS
from stenograph.training.recorded import RecordedBatch, read_batch, sessions_of, write_batch
from stenograph.types import Payload, Rollout, Routing, Sample, Task
from support.samples import make_sample, random_groups

TASKS = {"t": Task("t", "prompt", data={"not": {"JSON"}})}
ROLLOUTS = (
    Rollout("r0", "g", TASKS["t"], "s0", 0.1 + 0.2, "completed", None, {"a": -0.0, "b": 1e-300}, seconds=1 / 3),
    Rollout("r1", "g", TASKS["t"], "", None, "error", "it\nfailed"),
)


def same(one: Any, other: Any) -> bool:
    """Equal in every field and type; arrays to the bit."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return type(one) is type(other) and all(same(getattr(one, n), getattr(other, n)) for n in names)
    if isinstance(one, tuple):
        return type(other) is tuple and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def samples() -> list[Sample]:
    first, *others = random_groups()
    odd = np.array([0.0, -0.0, np.nan, -np.inf, 1e-42, *[0.5] * (len(first.ids) - 5)], np.float32)
    experts = (Routing(Payload("payload_1", "uint8", (4, 2, 2)), 9), Routing(Payload("payload_2", "uint8", ()), 12))
    turns = tuple(replace(turn, temperature=0.7, reward=1 / 3) for turn in first.turns)
    return [replace(first, rollout_logprobs=odd, experts=experts, turns=turns, reward=None), *others]


@pytest.mark.parametrize("samples", [samples(), [make_sample([("context", [1])])]], ids=["many", "one"])
def test_every_field_comes_back(tmp_path: Path, samples: list[Sample]) -> None:
    batch = RecordedBatch(12, ROLLOUTS, tuple(samples), b"\x00\xff")
    write_batch(tmp_path / "batch-000013", batch)
    again = read_batch(tmp_path / "batch-000013", TASKS)
    assert again.rollouts == ROLLOUTS
    assert same(again, batch)
    assert sessions_of(tmp_path / "batch-000013") == ["s0", ""]
    assert again.payloads == batch.payloads


def test_every_array_of_a_sample_is_a_signal() -> None:
    """What is not would be written as JSON, which has no arrays."""
    sample = make_sample([("context", [1]), ("output", [2])])
    arrays = {f.name for f in dataclasses.fields(sample) if isinstance(getattr(sample, f.name), np.ndarray)}
    assert arrays <= SIGNALS.keys()
    assert all(getattr(sample, name).dtype == SIGNALS[name].dtype for name in arrays)


def test_a_task_that_is_gone_keeps_its_name(tmp_path: Path) -> None:
    write_batch(tmp_path / "batch-000001", RecordedBatch(0, ROLLOUTS, (), b""))
    again = read_batch(tmp_path / "batch-000001", {})
    assert [rollout.task for rollout in again.rollouts] == [Task("t", "")] * 2
    assert again.samples == ()


@pytest.mark.parametrize("file", ["batch.json", "samples.safetensors"])
def test_a_damaged_batch_is_one_line(tmp_path: Path, file: str) -> None:
    path = tmp_path / "batch-000001"
    write_batch(path, RecordedBatch(0, ROLLOUTS, tuple(random_groups()), b""))
    (path / file).write_bytes((path / file).read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=f"{path} is damaged .*; begin a new run with --init-from"):
        read_batch(path, TASKS)
