"""What a step's arrays say of it: every rank has them whole, so that these numbers need no reduction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from stenograph.algorithms.kl import kl
from stenograph.algorithms.statistics import explained_variance, masked_mean
from stenograph.training.batch import TokenArrays, flat
from stenograph.training.credit import Attempt
from stenograph.training.updates import Updates
from stenograph.types import Sample

Metrics = dict[str, float | None]


def reward_by_task(attempts: Sequence[Attempt]) -> dict[str, float]:
    """The mean reward of each task's rollouts; those without a task are left out."""
    rewards: dict[str, list[float]] = {}
    for attempt in attempts:
        if attempt.task is not None:
            rewards.setdefault(attempt.task, []).append(attempt.reward)
    return {task: float(np.mean(values)) for task, values in rewards.items()}


def samples(
    attempts: Sequence[Attempt], samples: Sequence[Sample], sequences: Sequence[TokenArrays], version: int
) -> Metrics:
    """What the rollouts were like."""
    by_turn = [_turn_rewards(samples[n] for n in attempt.samples) for attempt in attempts]
    lengths = [sum(int(sequences[n]["loss_mask"].sum()) for n in attempt.samples) for attempt in attempts]
    staleness = (version - flat(sequences, "versions"))[flat(sequences, "loss_mask")].double()
    return {
        "turn_reward_mean": float(np.mean(by_turn)) if by_turn else None,  # of a rollout, its turns' together
        "response_length_mean": float(np.mean(lengths)) if lengths else None,  # trainable tokens of a rollout
        "response_length_max": float(max(lengths)) if lengths else None,
        "truncation_rate": float(np.mean([sample.truncated for sample in samples])) if samples else None,
        "staleness_mean": staleness.mean().item() if len(staleness) else None,  # in policy versions
        "staleness_max": staleness.max().item() if len(staleness) else None,
    }


def _turn_rewards(samples: Iterable[Sample]) -> float:
    """Of all turns that the samples hold, each once."""
    return sum({turn.turn: turn.reward or 0.0 for sample in samples for turn in sample.turns}.values())


def policies(sequences: Sequence[TokenArrays], *, has_old: bool, has_ref: bool) -> Metrics:
    """How far engine, trainer before the step, and reference are apart on trainable tokens, in nats a token."""
    mask = flat(sequences, "loss_mask")
    old, ref = flat(sequences, "old_logprobs").double(), flat(sequences, "ref_logprobs").double()
    # Raw log-probabilities of another temperature are no measure of the engine.
    comparable = mask & flat(sequences, "comparable")
    apart = (flat(sequences, "rollout_logprobs").double() - old)[comparable] if has_old else old[:0]
    to_ref = (old - ref)[mask] if has_old and has_ref else old[:0]

    def mean(x: torch.Tensor) -> float | None:
        return x.mean().item() if len(x) else None

    return {
        "logprob_difference_mean": mean(apart.abs()),
        "logprob_difference_p99": float(np.quantile(apart.abs().numpy(), 0.99)) if len(apart) else None,
        "rollout_kl_k1": mean(apart),  # of the engine's policy against the trainer's
        "rollout_kl_k3": mean(_k3(apart)),
        "ref_kl_k1": mean(to_ref),
        "ref_kl_k3": mean(_k3(to_ref)),
    }


def values(sequences: Sequence[TokenArrays], *, has_critic: bool) -> Metrics:
    """How good the critic was before its updates, over all trainable tokens; in the unit of the returns."""
    mask, values, returns = (flat(sequences, name) for name in ("loss_mask", "values", "returns"))
    knows = has_critic and bool(mask.any())
    return {
        "explained_variance": explained_variance(values, returns, mask) if knows else None,
        "value_mean": masked_mean(values, mask).item() if knows else None,
        "return_mean": masked_mean(returns, mask).item() if knows else None,
        "value_bias": masked_mean(values.double() - returns, mask).item() if knows else None,
    }


def explained_variance_by_turn(sequences: Sequence[TokenArrays]) -> list[float | None]:
    """Of the first turns of all samples, of the second ones, ..."""
    mask, turn, values, returns = (flat(sequences, name) for name in ("loss_mask", "turn", "values", "returns"))
    mask = mask & (turn >= 0)
    turn, order = turn[mask].sort(stable=True)  # so that every token is looked at once, however many turns there are
    values, returns = values[mask][order], returns[mask][order]
    counts = turn.bincount().tolist() if len(turn) else []
    parts = zip(values.split(counts), returns.split(counts), strict=True)
    return [explained_variance(v, r, torch.ones_like(v, dtype=torch.bool)) for v, r in parts]


def _k3(log_ratios: torch.Tensor) -> torch.Tensor:
    return kl(log_ratios, torch.zeros_like(log_ratios), kind="k3")


def updates(models: Mapping[str, Updates], grad_norms: Mapping[str, list[float]]) -> Metrics:
    """Mean gradient norms before clipping, of skipped updates too if they had one, and the rates of the next ones."""
    metrics: Metrics = {}
    for model, prefix in (("actor", ""), ("critic", "critic_")):
        norms = grad_norms.get(model)
        metrics[f"{prefix}grad_norm"] = float(np.mean(norms)) if norms else None
        metrics[f"{prefix}lr"] = models[model].lr if model in models else None
    return metrics
