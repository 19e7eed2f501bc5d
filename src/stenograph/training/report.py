"""What one training step did: every number is taken over the tokens that it names."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from stenograph.algorithms.statistics import merge_sums
from stenograph.training.batch import TokenArrays


@dataclass(frozen=True, slots=True)
class StepReport:
    """One training step. None where no token was computed.

    Tokens whose advantage is exactly 0 have no gradient and are not computed; they count in `num_tokens`, the loss's
    denominator, and not in what follows `num_computed_tokens`.
    """

    applied: bool  # at least one optimizer step changed the weights
    skipped: tuple[str, ...]  # why an optimizer step was not taken, one entry each
    num_updates: int  # optimizer steps applied
    num_rollouts: int
    num_tokens: int  # trainable tokens of the samples
    num_computed_tokens: int  # of these, the ones with an advantage
    num_forward_tokens: int  # positions that the model computed with gradients, shared ones once, over all passes
    reward_mean: float
    loss: float | None  # mean over optimizer steps, skipped ones too if they had a loss
    grad_norm: float | None  # before clipping; mean over the same steps
    ratio_mean: float | None
    ratio_max: float | None
    clip_low_fraction: float | None
    clip_high_fraction: float | None
    kl_k1: float | None  # of the old policy against the current one, nats a token
    kl_k3: float | None
    entropy: float | None  # sampled estimate, -mean(old_logprobs)
    logprob_difference_mean: float | None  # |rollout_logprobs - old_logprobs|
    logprob_difference_p99: float | None
    seconds: float


@dataclass(slots=True)
class Tally:
    """What a step's updates add up to, until it is reported."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    num_updates: int = 0
    num_forward_tokens: int = 0
    sums: dict[str, Tensor] | None = None

    def add_sums(self, sums: dict[str, Tensor]) -> None:
        self.sums = sums if self.sums is None else merge_sums(self.sums, sums)

    def report(
        self, sequences: list[TokenArrays], *, num_rollouts: int, reward_mean: float, seconds: float
    ) -> StepReport:
        masks = [arrays["loss_mask"] for arrays in sequences]
        computed = [a for a, mask in zip(sequences, masks, strict=True) if has_gradient(a) and mask.any()]
        old = _trainable(computed, "old_logprobs")
        difference = np.abs(_trainable(computed, "rollout_logprobs") - old)
        sums = {name: value.item() for name, value in (self.sums or {}).items()}
        n = sums.get("num_tokens", 0.0)

        def per_token(name: str) -> float | None:
            return sums[name] / n if n else None

        return StepReport(
            applied=self.num_updates > 0,
            skipped=tuple(self.skipped),
            num_updates=self.num_updates,
            num_rollouts=num_rollouts,
            num_tokens=int(sum(mask.sum() for mask in masks)),
            num_computed_tokens=len(old),
            num_forward_tokens=self.num_forward_tokens,
            reward_mean=reward_mean,
            loss=float(np.mean(self.losses)) if self.losses else None,
            grad_norm=float(np.mean(self.grad_norms)) if self.grad_norms else None,
            ratio_mean=per_token("ratio"),
            ratio_max=sums["ratio_max"] if n else None,
            clip_low_fraction=per_token("clip_low"),
            clip_high_fraction=per_token("clip_high"),
            kl_k1=per_token("kl_k1"),
            kl_k3=per_token("kl_k3"),
            entropy=float(-old.mean()) if len(old) else None,
            logprob_difference_mean=float(difference.mean()) if len(old) else None,
            logprob_difference_p99=float(np.quantile(difference, 0.99)) if len(old) else None,
            seconds=seconds,
        )


def has_gradient(arrays: TokenArrays) -> bool:
    """Whether a sequence moves the weights at all: a token whose advantage is exactly 0 has gradient exactly 0."""
    return bool((arrays["advantages"][arrays["loss_mask"]] != 0).any())


def _trainable(sequences: list[TokenArrays], name: str) -> np.ndarray:
    """[trainable tokens] float64."""
    values = [arrays[name][arrays["loss_mask"]] for arrays in sequences]
    return np.concatenate(values, dtype=np.float64) if values else np.empty(0)
