"""Losses of policy and critic: sums over a denominator, so that parts add up; outside the mask nothing is read."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stenograph.algorithms.kl import kl
from stenograph.algorithms.statistics import sequence_reduced

PolicyLossKind = Literal["ppo_clip", "gspo", "cispo"]

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
    """Policy-gradient loss of one micro-batch, and the sums that its metrics are made of.

    logprobs, old_logprobs, advantages, weights  [tokens] float; old_logprobs, advantages and weights are constants.
    mask         [tokens] bool. NaN or infinity outside it changes nothing, gradients included (they are exactly 0).
    cu_seqlens   [sequences + 1] int32, for `gspo`, which has one ratio per sequence.
    weights      importance weights that multiply each token's loss; a token of weight 0 is outside the mask. Each
                 sequence's 1 / length with the number of sequences as the denominator makes a mean over sequences.
    denominator  tokens of the whole (mini-)batch, so that losses and gradients of micro-batches add up.
    Returns the scalar loss, and detached float64 sums: `num_tokens`, `clip_low`, `clip_high` and `clip_dual` (tokens
    whose gradient is cut; with `cispo`, whose ratio is), `ratio`, `kl_k1`, `kl_k3` (of old against new), and
    `ratio_max`; see `merge_sums`.

    ppo_clip: -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A). Schulman et al. 2017 (arXiv:1707.06347),
    eq. 7; two clip bounds: Yu et al. 2025, "DAPO" (arXiv:2503.14476), 3.1. With `clip_dual` = c > 1 the loss of a
    negative A is at most -c * A: Ye et al. 2020 (arXiv:1912.09729), eq. 5.
    gspo: the same with the geometric mean of the sequence's ratios for each of its tokens, whose own ratio carries the
    gradient. Zheng et al. 2025 (arXiv:2507.18071), "GSPO-token", 4.3.
    cispo: -clip(ratio, 1 - clip_low, 1 + clip_high) * A * logprob, the clipped ratio a constant, so that no token loses
    its gradient. MiniMax 2025 (arXiv:2506.13585), 3.1. A `clip_low` of 1 or more leaves small ratios as they are.
    """
    if kind not in ("ppo_clip", "gspo", "cispo"):
        raise ValueError(f"unknown policy loss {kind!r}; known: ppo_clip, gspo, cispo")
    if kind == "cispo" and clip_dual is not None:
        raise ValueError("policy loss 'cispo' has no use for clip_dual; leave it out")
    if weights is not None:
        mask = mask & (weights != 0)
    logprobs, old_logprobs, advantages = logprobs[mask], old_logprobs[mask].detach(), advantages[mask].detach()

    log_ratio = logprobs - old_logprobs
    if kind == "gspo":
        log_ratio = sequence_reduced(log_ratio.detach(), mask, cu_seqlens, "mean") + (logprobs - logprobs.detach())
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    cut = {"clip_low": ratio < 1 - clip_low, "clip_high": ratio > 1 + clip_high, "clip_dual": torch.zeros_like(mask)}
    if kind == "cispo":
        losses = -bounded.detach() * advantages * logprobs
    else:
        losses = torch.maximum(-advantages * ratio, -advantages * bounded)
        cut["clip_low"] &= advantages < 0
        cut["clip_high"] &= advantages > 0
    if clip_dual is not None:
        bound = -clip_dual * advantages
        cut["clip_dual"] = (advantages < 0) & (losses > bound)
        losses = torch.where(cut["clip_dual"], bound, losses)
    if weights is not None:
        losses = losses * weights[mask].detach()
    return losses.sum() / denominator, _policy_sums(logprobs, old_logprobs, ratio, cut)


@torch.no_grad()
def _policy_sums(logprobs: Tensor, old_logprobs: Tensor, ratio: Tensor, cut: dict[str, Tensor]) -> dict[str, Tensor]:
    counts = {name: tokens.sum() for name, tokens in cut.items()}
    sums = {
        "num_tokens": ratio.new_tensor(len(ratio), dtype=torch.float64),
        **counts,
        "ratio": ratio.double().sum(),
        "ratio_max": ratio.max() if len(ratio) else ratio.new_zeros(()),
        "kl_k1": kl(old_logprobs, logprobs, kind="k1").double().sum(),
        "kl_k3": kl(old_logprobs, logprobs, kind="k3").double().sum(),
    }
    return {name: value.double() for name, value in sums.items()}


def value_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
    denominator: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared-error loss of a critic on one micro-batch, and the sums that its metrics are made of.

    values, returns, old_values  [tokens] float, in the unit of the rewards; returns and old_values are constants.
    mask         [tokens] bool. What lies outside changes nothing, gradients included.
    clip         how far a value may move from `old_values` and still lower the loss; None: any distance.
    denominator  tokens of the whole (mini-)batch, as in `policy_loss`.
    Returns the scalar loss, and detached float64 sums: `num_tokens`, and `value_clip` (tokens whose gradient is cut).

    0.5 (V - R)^2; with `clip` the larger of that and 0.5 (clamp(V, V_old - clip, V_old + clip) - R)^2: Engstrom et al.
    2020 (arXiv:2005.12729), 3, where the smaller one stands for the larger by mistake.

    Raises ValueError for one of `clip` and `old_values` without the other.
    """
    if (clip is None) != (old_values is None):
        raise ValueError("a clipped value loss needs clip and old_values; give both, or neither")
    values, returns = values[mask], returns[mask].detach()
    errors = (values - returns).square()
    is_cut = torch.zeros_like(errors, dtype=torch.bool)
    if clip is not None and old_values is not None:
        old_values = old_values[mask].detach()
        bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square()
        is_cut = bounded > errors
        errors = torch.maximum(errors, bounded)
    return 0.5 * errors.sum() / denominator, {"num_tokens": mask.sum().double(), "value_clip": is_cut.sum().double()}
