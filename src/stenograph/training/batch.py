"""What a training sequence carries at each token: every array is declared in SIGNALS, once, and has len(ids)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stenograph.traces.samples import UNSELECTED
from stenograph.types import Sample


@dataclass(frozen=True, slots=True)
class Signal:
    """A per-token array; `padding` stands where nothing is known. Those `recorded` go where training.record says."""

    dtype: type[np.generic]
    padding: int | float
    recorded: bool = False


# Packing, the device and recording follow this table: another signal is one line here, and its value in `sequence`.
SIGNALS: dict[str, Signal] = {
    "ids": Signal(np.int32, 0),
    "action_mask": Signal(np.bool_, False),  # sampled, trainable or not
    "loss_mask": Signal(np.bool_, False, recorded=True),
    "mask_reason": Signal(np.uint8, 0, recorded=True),  # of an action that is not trained: index in MASK_REASONS
    "turn": Signal(np.int32, -1),  # of an action: which of the sample's turns
    "versions": Signal(np.int32, -1),
    "temperature": Signal(np.float32, 1.0),
    "rollout_logprobs": Signal(np.float32, 0.0),
    "comparable": Signal(np.bool_, False),  # rollout_logprobs are of the distribution that was sampled from
    "old_logprobs": Signal(np.float32, 0.0, recorded=True),
    "ref_logprobs": Signal(np.float32, 0.0, recorded=True),
    "rewards": Signal(np.float32, 0.0, recorded=True),
    "values": Signal(np.float32, 0.0, recorded=True),  # frozen before the first update
    "advantages": Signal(np.float32, 0.0, recorded=True),
    "returns": Signal(np.float32, 0.0, recorded=True),
    "weights": Signal(np.float32, 1.0),  # of the token's policy loss; 0: rejected
}

MASK_REASONS = ("", "greedy", "truncated_support", "penalised", "constrained", UNSELECTED)

TokenArrays = dict[str, NDArray[Any]]  # name in SIGNALS -> [tokens]


def sequence(sample: Sample) -> TokenArrays:
    """Every signal of one sample; what only the trainer knows (old_logprobs, advantages, ...) is padding still.

    Raises ValueError where an array is not as long as the ids, or the first token was sampled (nothing predicts it).
    """
    arrays: TokenArrays = {
        name: np.full(len(sample.ids), signal.padding, signal.dtype) for name, signal in SIGNALS.items()
    }
    for name in ("ids", "loss_mask", "rollout_logprobs", "versions"):
        values = getattr(sample, name)
        if len(values) != len(sample.ids):
            raise ValueError(f"{_name(sample)}: {len(values)} {name} for {len(sample.ids)} ids")
        arrays[name][:] = values
    arrays["action_mask"][:] = arrays["versions"] >= 0
    if arrays["action_mask"][:1].any() or arrays["loss_mask"][:1].any():
        raise ValueError(f"{_name(sample)}: its first token is an action, but nothing comes before it to predict it")
    if (arrays["loss_mask"] & ~arrays["action_mask"]).any():
        raise ValueError(f"{_name(sample)}: tokens are trainable that have no policy version, and were not sampled")
    for number, turn in enumerate(sample.turns):
        span = slice(turn.start, turn.end)
        arrays["turn"][span] = number
        arrays["mask_reason"][span] = MASK_REASONS.index(turn.mask_reason or "")
        # Temperature 0 is the argmax, which has no log-probability of its own: engines report the model's.
        arrays["temperature"][span] = turn.temperature or 1.0
        # Raw ones are the model's, before temperature.
        arrays["comparable"][span] = turn.logprobs_mode == "processed" or turn.temperature == 1.0
    arrays["comparable"] &= arrays["action_mask"]
    return arrays


def num_trainable(sequences: Iterable[TokenArrays]) -> int:
    """Tokens that may be trained."""
    return sum(int(arrays["loss_mask"].sum()) for arrays in sequences)


def flat(sequences: Sequence[TokenArrays], name: str) -> Tensor:
    """One signal of all sequences, end to end: [tokens]."""
    if not sequences:
        return torch.from_numpy(np.empty(0, SIGNALS[name].dtype))
    return torch.from_numpy(np.concatenate([arrays[name] for arrays in sequences]))


def bounds(sequences: Sequence[TokenArrays]) -> Tensor:
    """Where the sequences begin in `flat`, and its end: [sequences + 1] int32."""
    return torch.from_numpy(np.cumsum([0, *(len(arrays["ids"]) for arrays in sequences)], dtype=np.int32))


def spread(values: Tensor, into: Sequence[TokenArrays], name: str) -> None:
    """The inverse of `flat`."""
    for arrays, part in zip(into, values.split([len(arrays["ids"]) for arrays in into]), strict=True):
        arrays[name][:] = part.numpy()


def _name(sample: Sample) -> str:
    return f"sample {sample.session}/{sample.branch}"
