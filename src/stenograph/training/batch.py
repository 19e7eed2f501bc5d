"""What a training sequence carries at each token: every array is declared in SIGNALS, once, and has len(ids)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stenograph.types import Sample


@dataclass(frozen=True, slots=True)
class Signal:
    """A per-token array; `padding` stands where nothing is known."""

    dtype: type[np.generic]
    padding: int | float


# Packing and the device follow this table: another signal is one line here, and its value in `sequence`.
SIGNALS: dict[str, Signal] = {
    "ids": Signal(np.int32, 0),
    "loss_mask": Signal(np.bool_, False),
    "rollout_logprobs": Signal(np.float32, 0.0),
    "old_logprobs": Signal(np.float32, 0.0),
    "advantages": Signal(np.float32, 0.0),
    "temperature": Signal(np.float32, 1.0),
    "versions": Signal(np.int32, -1),
}

TokenArrays = dict[str, NDArray[Any]]  # name in SIGNALS -> [tokens]


def sequence(sample: Sample) -> TokenArrays:
    """Every signal of one sample; what only the trainer knows (old_logprobs, advantages) is padding still.

    Raises ValueError where an array is not as long as the ids, or the first token is trainable (nothing predicts it).
    """
    arrays = {name: np.full(len(sample.ids), signal.padding, signal.dtype) for name, signal in SIGNALS.items()}
    for name in ("ids", "loss_mask", "rollout_logprobs", "versions"):
        values = getattr(sample, name)
        if len(values) != len(sample.ids):
            raise ValueError(f"{_name(sample)}: {len(values)} {name} for {len(sample.ids)} ids")
        arrays[name][:] = values
    if arrays["loss_mask"][:1].any():
        raise ValueError(f"{_name(sample)}: its first token is trainable, but nothing comes before it to predict it")
    for turn in sample.turns:
        # Temperature 0 is the argmax, which has no log-probability of its own: engines report the model's.
        arrays["temperature"][turn.start : turn.end] = turn.temperature or 1.0
    return arrays


def num_trainable(sequences: Iterable[TokenArrays]) -> int:
    """Tokens that the loss is taken over."""
    return sum(int(arrays["loss_mask"].sum()) for arrays in sequences)


def _name(sample: Sample) -> str:
    return f"sample {sample.session}/{sample.branch}"
