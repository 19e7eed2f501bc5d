"""Policy losses and KL estimates: what lies outside the mask is never read, whatever it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

PolicyLossKind = Literal["ppo_clip"]
KLKind = Literal["k1", "k2", "k3", "abs"]

# exp(20) is far outside any clip range; beyond it the ratio would overflow and 0 * inf poison the gradient.
_MAX_LOG_RATIO = 20.0


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    kind: PolicyLossKind,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None = None,
    weights: Tensor | None = None,
    denominator: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy-gradient loss of one micro-batch, and the sums that its metrics are made of.

    logprobs, old_logprobs, advantages, weights  [tokens] float; old_logprobs, advantages and weights are constants.
    mask         [tokens] bool. NaN or infinity outside it changes nothing, gradients included (they are exactly 0).
    cu_seqlens   [sequences + 1] int32, for kinds with one ratio per sequence; `ppo_clip` works per token.
    weights      importance weights that multiply each token's loss.
    denominator  tokens of the whole (mini-)batch, so that losses and gradients of micro-batches add up.
    Returns the scalar loss, and detached float64 sums: `num_tokens`, `clip_low`, `clip_high` and `clip_dual` (tokens
    whose gradient is cut), `ratio`, `kl_k1`, `kl_k3` (of old against new), and `ratio_max`; see `merge_sums`.

    ppo_clip: -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A). Schulman et al. 2017 (arXiv:1707.06347),
    eq. 7; two clip bounds: Yu et al. 2025, "DAPO" (arXiv:2503.14476), 3.1. With `clip_dual` = c > 1 the loss of a
    negative A is at most -c * A: Ye et al. 2020 (arXiv:1912.09729), eq. 5.
    """
    if kind != "ppo_clip":
        raise ValueError(f"unknown policy loss {kind!r}; known: ppo_clip")
    logprobs, old_logprobs, advantages = logprobs[mask], old_logprobs[mask].detach(), advantages[mask].detach()

    log_ratio = (logprobs - old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(unclipped, clipped)
    is_dual = torch.zeros_like(losses, dtype=torch.bool)
    if clip_dual is not None:
        bound = -clip_dual * advantages
        is_dual = (advantages < 0) & (losses > bound)
        losses = torch.where(is_dual, bound, losses)
    if weights is not None:
        losses = losses * weights[mask].detach()
    loss = losses.sum() / denominator

    with torch.no_grad():
        sums = {
            "num_tokens": mask.sum(),
            "clip_low": ((advantages < 0) & (ratio < 1 - clip_low)).sum(),
            "clip_high": ((advantages > 0) & (ratio > 1 + clip_high)).sum(),
            "clip_dual": is_dual.sum(),
            "ratio": ratio.double().sum(),
            "ratio_max": ratio.max() if len(ratio) else ratio.new_zeros(()),
            "kl_k1": kl(old_logprobs, logprobs, kind="k1").double().sum(),
            "kl_k3": kl(old_logprobs, logprobs, kind="k3").double().sum(),
        }
    return loss, {name: value.double() for name, value in sums.items()}


def merge_sums(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums of two micro-batches taken together: names that end in `_max` by maximum, the others by addition."""
    return {name: torch.maximum(a[name], b[name]) if name.endswith("_max") else a[name] + b[name] for name in a}


def kl(logprobs: Tensor, ref_logprobs: Tensor, *, kind: KLKind) -> Tensor:
    """Estimate KL(policy || reference) at each token, not reduced; tokens were sampled from the policy.

    logprobs, ref_logprobs  [tokens] float, in nats. Returns [tokens].

    With d = logprobs - ref_logprobs. k1: d, unbiased. k2: d^2 / 2. k3: exp(-d) - 1 + d, unbiased and never negative.
    abs: |d|. Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
    """
    d = logprobs - ref_logprobs
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return torch.expm1(-d) + d
    if kind == "abs":
        return d.abs()
    raise ValueError(f"unknown KL kind {kind!r}; known: k1, k2, k3, abs")
