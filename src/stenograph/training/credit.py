"""From rewards to advantages: a rollout counts once, however it branched, and every branch gets what it earned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stenograph.algorithms.advantages import AdvantageKind, group_advantages
from stenograph.algorithms.gae import gae, length_adaptive_lam
from stenograph.algorithms.kl import KLKind, kl, penalised_rewards
from stenograph.algorithms.statistics import masked_mean, whiten
from stenograph.config_training import AlgorithmConfig, KLConfig
from stenograph.training.batch import TokenArrays, bounds, flat, num_trainable, spread
from stenograph.types import Sample


@dataclass(frozen=True, slots=True)
class Attempt:
    """The samples of one rollout, which share its reward."""

    samples: tuple[int, ...]  # indices into the step's samples
    group: str
    reward: float
    task: str | None


def attempts_of(samples: Sequence[Sample]) -> list[Attempt]:
    """Samples by the rollout that they come from, in the order of first appearance.

    A sample without a rollout is one of its own session; a rollout without a group is a group of its own.

    Raises ValueError for a rollout without a reward, with one that is not finite, and whose samples disagree.
    """
    members: dict[str, list[int]] = {}
    for n, sample in enumerate(samples):
        members.setdefault(sample.rollout_id or sample.session, []).append(n)
    attempts = []
    for name, indices in members.items():
        rewards = {samples[n].reward for n in indices}
        groups = {samples[n].group_id for n in indices}
        if len(rewards) > 1 or len(groups) > 1:
            raise ValueError(f"samples of rollout {name} disagree: rewards {rewards}, groups {groups}")
        (reward,), (group,) = rewards, groups
        if reward is None:
            raise ValueError(f"rollout {name} has no reward; judge it, or leave it out of the step")
        of_turns = [turn.reward for n in indices for turn in samples[n].turns if turn.reward is not None]
        if not np.isfinite([reward, *of_turns]).all():  # in one whitened batch it would spoil every other advantage
            raise ValueError(f"rollout {name} has a reward that is not finite; judge it anew, or leave it out")
        attempts.append(Attempt(tuple(indices), group or f"rollout {name}", reward, samples[indices[0]].task_id))
    return attempts


def credited(attempt: Attempt, samples: Sequence[Sample], credit: str) -> tuple[int, ...]:
    """The samples that a rollout's reward is for: all, or the one that ended its main conversation."""
    if credit == "every_branch":
        return attempt.samples
    return (max(attempt.samples, key=lambda n: (samples[n].role == "main", samples[n].branch)),)


def spread_advantages(
    attempts: Sequence[Attempt],
    rewards: Tensor,
    samples: Sequence[Sample],
    sequences: Sequence[TokenArrays],
    config: AlgorithmConfig,
) -> None:
    """Give every trainable token the advantage of its rollout; `rewards` [attempts] float64."""
    lengths = None
    if config.estimator == "opo":  # a rollout without a trainable token weighs next to nothing
        counts = [num_trainable(sequences[n] for n in attempt.samples) for attempt in attempts]
        lengths = torch.tensor(counts).clamp(min=1)
    assert config.estimator != "gae"
    kind: AdvantageKind = config.estimator
    groups = [attempt.group for attempt in attempts]
    advantages = group_advantages(rewards, groups, kind=kind, lengths=lengths, k=config.k)
    for attempt, advantage in zip(attempts, advantages.tolist(), strict=True):
        for n in credited(attempt, samples, config.credit):
            sequences[n]["advantages"][sequences[n]["loss_mask"]] = advantage


def place_rewards(
    attempts: Sequence[Attempt],
    rewards: Tensor,
    samples: Sequence[Sample],
    sequences: Sequence[TokenArrays],
    config: AlgorithmConfig,
) -> None:
    """Add each rollout's reward, [attempts] float64, to that of its last action."""
    for attempt, reward in zip(attempts, rewards.tolist(), strict=True):
        for n in credited(attempt, samples, config.credit):
            actions = np.flatnonzero(sequences[n]["action_mask"])
            sequences[n]["rewards"][actions[-1:]] += reward


def place_turn_rewards(samples: Sequence[Sample], sequences: Sequence[TokenArrays]) -> None:
    """Add the rewards of turns to those of their last actions."""
    for arrays, sample in zip(sequences, samples, strict=True):
        for turn in sample.turns:
            if turn.reward is not None and turn.start < turn.end:
                arrays["rewards"][turn.end - 1] += turn.reward


def kl_kind(kl_config: KLConfig) -> KLKind:
    """The estimator of the divergence: in the reward it needs no gradient, and k1 is the unbiased one."""
    return kl_config.kind or ("k2" if kl_config.placement == "loss" else "k1")


def penalise(sequences: Sequence[TokenArrays], kl_config: KLConfig, *, beta: float, is_sampled: bool) -> float:
    """Subtract what it costs to move away from the reference from the rewards of trainable tokens.

    Elsewhere an action was not drawn from the policy's softmax, and has no divergence. `is_sampled`: by the
    log-probabilities of the engine, where they are of the distribution that was sampled from. Returns the divergence,
    in nats a token.
    """
    old = flat(sequences, "old_logprobs")
    if is_sampled:
        old = torch.where(flat(sequences, "comparable"), flat(sequences, "rollout_logprobs"), old)
    mask = flat(sequences, "loss_mask")
    estimates = kl(old, flat(sequences, "ref_logprobs"), kind=kl_kind(kl_config))
    spread(penalised_rewards(flat(sequences, "rewards"), estimates, mask, beta=beta), sequences, "rewards")
    return masked_mean(estimates, mask).item()


def estimate_advantages(sequences: Sequence[TokenArrays], at_ends: Tensor, config: AlgorithmConfig) -> None:
    """Advantages and returns of every action, from rewards and values; `at_ends` [sequences]: V where one was cut."""
    action_mask, cu_seqlens = flat(sequences, "action_mask"), bounds(sequences)
    lam: float | Tensor = (
        length_adaptive_lam(action_mask, cu_seqlens, alpha=config.lam_alpha)
        if config.lam == "length_adaptive"
        else config.lam
    )

    def estimate(lam: float | Tensor) -> tuple[Tensor, Tensor]:
        return gae(
            flat(sequences, "rewards"),
            flat(sequences, "values"),
            action_mask,
            cu_seqlens,
            gamma=config.gamma,
            lam=lam,
            bootstrap=at_ends if config.bootstrap == "value" else None,
            turn_ids=flat(sequences, "turn"),
            turn_gamma=config.gamma if config.turn_gamma is None else config.turn_gamma,
            turn_lam=config.turn_lam,
        )

    advantages, returns = estimate(lam)
    if config.critic_lam is not None:
        _, returns = estimate(config.critic_lam)
    if config.whiten:
        advantages = whiten(advantages, flat(sequences, "loss_mask"))
    spread(advantages, sequences, "advantages")
    spread(returns, sequences, "returns")
