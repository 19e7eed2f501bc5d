"""Divergence from a reference: measured at each token, and what is made of it is a new tensor."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLKind = Literal["k1", "k2", "k3", "abs"]

# Up to here k3 is exact; beyond, exp(20) is its slope, so that neither it nor its gradient overflows or vanishes.
_MAX_EXPONENT = 20.0


def kl(logprobs: Tensor, ref_logprobs: Tensor, *, kind: KLKind) -> Tensor:
    """Estimate KL(policy || reference) at each token, not reduced; tokens were sampled from the policy.

    logprobs, ref_logprobs  [tokens] float, in nats. Returns [tokens], with the gradients of both.

    With d = logprobs - ref_logprobs. k1: d, unbiased. k2: d^2 / 2. k3: exp(-d) - 1 + d, unbiased and never negative,
    continued as a straight line where -d > 20. abs: |d|. Schulman 2020, "Approximating KL divergence"
    (joschu.net/blog/kl-approx.html).
    """
    d = logprobs - ref_logprobs
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        exponent = (-d).clamp(max=_MAX_EXPONENT)
        return torch.expm1(exponent) + exponent.detach().exp() * (-d - exponent) + d
    if kind == "abs":
        return d.abs()
    raise ValueError(f"unknown KL kind {kind!r}; known: k1, k2, k3, abs")


def kl_loss(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, kind: KLKind, denominator: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The divergence as a loss, to be weighted and added to the policy's.

    logprobs, ref_logprobs  [tokens] float, in nats; ref_logprobs are constants.
    mask         [tokens] bool. What lies outside changes nothing, gradients included.
    denominator  as in `policy_loss`.
    Returns the scalar loss, in nats, and detached float64 sums: `num_tokens`, `ref_kl` (by `kind`).

    Raises ValueError for k1: its gradient, that of logprobs, is 0 in expectation, while k2's is that of the divergence
    (Tang and Munos 2025 (arXiv:2506.09477)).
    """
    if kind == "k1":
        raise ValueError(
            'KL kind "k1" has an expected gradient of 0 as a loss; use "k2", or subtract it from the rewards'
        )
    estimates = kl(logprobs[mask], ref_logprobs[mask].detach(), kind=kind)
    sums = {"num_tokens": mask.sum().double(), "ref_kl": estimates.detach().double().sum()}
    return estimates.sum() / denominator, sums


def penalised_rewards(rewards: Tensor, kl_estimates: Tensor, action_mask: Tensor, *, beta: float) -> Tensor:
    """Rewards less the divergence of each action, so that the critic learns it too.

    rewards, kl_estimates  [tokens] float; action_mask [tokens] bool; beta in units of reward per nat.
    Returns [tokens] without gradient, a tensor of its own: r_t - beta KL_t on actions, `rewards` elsewhere.

    Ouyang et al. 2022 (arXiv:2203.02155), eq. 2; Ziegler et al. 2019 (arXiv:1909.08593), eq. 2.
    """
    return torch.where(action_mask, rewards - beta * kl_estimates, rewards).detach()


def adapted_beta(beta: float, measured_kl: float, *, target_kl: float, num_rollouts: int, horizon: int) -> float:
    """The next step's beta: larger where the divergence was over its target, smaller where it was under it.

    measured_kl, target_kl  mean nats of a rollout, or of a token: both the same.
    num_rollouts / horizon  how far one step moves it: at most by a fifth of that.

    Ziegler et al. 2019 (arXiv:1909.08593), 2.2.
    """
    error = min(max(measured_kl / target_kl - 1, -0.2), 0.2)
    return beta * (1 + error * num_rollouts / horizon)
