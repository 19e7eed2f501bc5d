"""What a token's policy loss is multiplied by, and what their sum is divided by; GAE's mask is none of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stenograph.algorithms.offpolicy import importance_weights
from stenograph.config_training import AlgorithmConfig, OffPolicyConfig
from stenograph.training.batch import TokenArrays, bounds, flat, num_trainable, spread

METRICS = (
    "importance_weight_mean",
    "importance_weight_max",
    "truncated_fraction",
    "vetoed_fraction",
    "rejected_fraction",
)


def correct(sequences: Sequence[TokenArrays], off_policy: OffPolicyConfig, version: int) -> dict[str, float | None]:
    """Weigh tokens by how much likelier the trainer's policy makes them than the engine's did; returns metrics.

    `version`: the policy's that is trained. Where the engine's log-probabilities are of another distribution than was
    sampled from, nothing is known of the ratio, and it is taken for 1; a sequence's weight and its veto are theirs too.
    """
    if off_policy.level == "none":
        return dict.fromkeys(METRICS)
    mask, old_logprobs = flat(sequences, "loss_mask"), flat(sequences, "old_logprobs")
    rollout_logprobs = torch.where(flat(sequences, "comparable"), flat(sequences, "rollout_logprobs"), old_logprobs)
    weights, sums = importance_weights(
        old_logprobs,
        rollout_logprobs,
        mask,
        bounds(sequences),
        level=off_policy.level,
        bound=off_policy.bound,
        high=off_policy.high,
        low=off_policy.low,
        veto=off_policy.veto,
    )
    if off_policy.max_staleness is not None:
        weights = weights.masked_fill(mask & (version - flat(sequences, "versions") > off_policy.max_staleness), 0.0)
    spread(weights, sequences, "weights")
    n = max(1, num_trainable(sequences))
    measured = (
        weights[mask].double().sum().item() / n,
        weights[mask].max().item() if mask.any() else None,
        sums["truncated"].item() / n,
        sums["vetoed"].item() / n,
        (weights[mask] == 0).sum().item() / n,
    )
    return dict(zip(METRICS, measured, strict=True))


def is_weighted(config: AlgorithmConfig) -> bool:
    """Whether any weight is other than 1."""
    return config.off_policy.level != "none" or config.reduction == "sequence_mean"


def reduce(sequences: Sequence[TokenArrays], config: AlgorithmConfig) -> None:
    """Make weights of a mean over each sequence, where the loss is a mean of those."""
    if config.reduction != "sequence_mean":
        return
    for arrays in sequences:
        arrays["weights"] /= max(1, _counted(arrays, config).sum())


def denominator(sequences: Sequence[TokenArrays], config: AlgorithmConfig) -> float:
    """What the sum of the weighted losses of a mini-batch is divided by; 0: nothing in it is trainable."""
    counted = [int(_counted(arrays, config).sum()) for arrays in sequences]
    if config.reduction == "token_mean":
        return float(sum(counted))
    num_sequences = sum(count > 0 for count in counted)
    return float(num_sequences * (config.length or 1))


def _counted(arrays: TokenArrays, config: AlgorithmConfig) -> np.ndarray:
    """[tokens] bool."""
    if config.off_policy.count_rejected:
        return arrays["loss_mask"]
    return arrays["loss_mask"] & (arrays["weights"] != 0)
