"""What one training step did: every number is declared, and made of sums that no split of the batch changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from stenograph.algorithms.statistics import merge_sums
from stenograph.training.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Mean:
    """One sum divided by another; none where that is 0."""

    total: str
    over: str


@dataclass(frozen=True, slots=True)
class Largest:
    of: str


# What the losses' sums are made to, by "model/sum". A sum that none of these reads is refused, not dropped.
METRICS: dict[str, Mean | Largest] = {
    "loss": Mean("actor/loss", "actor/updates"),
    "ratio_mean": Mean("actor/ratio", "actor/num_tokens"),
    "ratio_max": Largest("actor/ratio_max"),
    "clip_low_fraction": Mean("actor/clip_low", "actor/num_tokens"),
    "clip_high_fraction": Mean("actor/clip_high", "actor/num_tokens"),
    "clip_dual_fraction": Mean("actor/clip_dual", "actor/num_tokens"),
    "kl_k1": Mean("actor/kl_k1", "actor/num_tokens"),  # of the old policy against the current one, nats a token
    "kl_k3": Mean("actor/kl_k3", "actor/num_tokens"),
    "entropy": Mean("entropy/entropy", "entropy/num_tokens"),  # of whole distributions, in the first epoch
    "kl_loss": Mean("kl/ref_kl", "kl/num_tokens"),  # before beta
    "critic_loss": Mean("critic/loss", "critic/updates"),
    "value_clip_fraction": Mean("critic/value_clip", "critic/num_tokens"),
}
_SUMS = {name for m in METRICS.values() for name in ([m.of] if isinstance(m, Largest) else [m.total, m.over])}


class Tally:
    """What a step's losses add up to on this rank, until they are reported."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self.num_forward_tokens = 0

    def add(self, model: str, sums: Mapping[str, Tensor]) -> None:
        """Raises ValueError for a sum that no metric is made of."""
        named = {f"{model}/{name}": value.detach().double().cpu() for name, value in sums.items()}
        if unknown := named.keys() - _SUMS:
            raise ValueError(f"no metric is made of {', '.join(sorted(unknown))}; declare one in METRICS")
        known = {name: self._sums[name] for name in named if name in self._sums}
        self._sums |= named | (merge_sums(known, {name: named[name] for name in known}) if known else {})

    def metrics(self, ranks: Ranks) -> dict[str, float | None]:
        """Every metric, over all ranks."""
        sums = {name: value.item() for name, value in ranks.reduce(self._sums).items()}
        return {name: _made(metric, sums) for name, metric in METRICS.items()}


def _made(metric: Mean | Largest, sums: Mapping[str, float]) -> float | None:
    if isinstance(metric, Largest):
        return sums.get(metric.of)
    return sums[metric.total] / sums[metric.over] if sums.get(metric.over) else None


@dataclass(frozen=True, slots=True)
class StepReport:
    """One training step. `metrics` are those of METRICS and of `measuring`, None where there is nothing to measure.

    Sequences that cannot move the actor are not computed; they count in `num_tokens`, and not in its metrics.
    """

    applied: bool  # an update changed the actor
    is_warmup: bool  # the actor was left as it is, for the critic to learn
    num_updates: int  # of the actor, applied
    num_critic_updates: int
    skipped: tuple[str, ...]  # why an update was not made, one entry each
    num_rollouts: int
    num_tokens: int  # trainable tokens of the samples
    num_computed_tokens: int  # of these, those of sequences that the actor can learn from
    num_forward_tokens: int  # positions computed with gradients, by either model, shared ones once, over all passes
    reward_mean: float
    reward_by_task: dict[str, float]
    explained_variance_by_turn: list[float | None]  # of the n-th turns of all samples
    loss_denominator: str  # algorithm.reduction
    seconds: float
    metrics: dict[str, float | None]

    def row(self) -> dict[str, Any]:
        """As a row of metrics.jsonl."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "metrics"}
        return named | self.metrics
