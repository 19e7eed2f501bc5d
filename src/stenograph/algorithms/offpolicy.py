"""Importance weights between the policy that sampled and the one that is trained: constants, 0 where rejected."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from stenograph.algorithms.kl import kl
from stenograph.algorithms.statistics import sequence_reduced

RatioLevel = Literal["token", "sequence", "geometric"]
RatioBound = Literal["truncate", "mask"]

_MAX_LOG_RATIO = 20.0  # exp(20) is far outside any bound


def importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    level: RatioLevel,
    bound: RatioBound,
    high: float,
    low: float | None = None,
    veto: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """How much likelier the trainer's policy made each token than the engine's did when it sampled, within bounds.

    old_logprobs, rollout_logprobs  [tokens] float, in nats: trainer before the update, engine when sampled.
    mask         [tokens] bool. What lies outside is never read.
    cu_seqlens   [sequences + 1] int, bounds of the sequences.
    level        token: exp(d), d = old - rollout. sequence: exp of its sum, geometric: exp of its mean over the masked
                 tokens of the sequence, for each of them.
    bound        truncate: at most `high`. mask: 0 where outside [low, high].
    veto         a sequence with a token whose exp(d) is below this is rejected whole.
    Returns      [tokens] weights in the dtype of old_logprobs, 0 outside the mask, and float64 sums over the mask:
                 `num_tokens`, `weight`, `weight_squared`, `weight_max`; how many tokens were `truncated`, `rejected`
                 (weight 0) and, among these, `vetoed`; `rollout_kl_k1` and `rollout_kl_k3`, nats of the engine's policy
                 against the trainer's.

    `policy_loss` takes the weights; a rejected token is outside its mask. Whether it counts in the denominator is its
    caller's choice: `num_tokens`, or `num_tokens - rejected`. The mask that `gae` walks stays as it is.

    Truncated: Espeholt et al. 2018 (arXiv:1802.01561), 4.1; per token between two engines: Yao et al. 2025, "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training". Masked: Liu et al. 2025, "When Speed Kills
    Stability".

    Raises ValueError for unknown kinds, and for bounds that the kind does not read or that are out of order.
    """
    if level not in ("token", "sequence", "geometric") or bound not in ("truncate", "mask"):
        known = "known: token, sequence, geometric; truncate, mask"
        raise ValueError(f"unknown importance weights {level!r}, {bound!r}; {known}")
    if veto is not None and veto <= 0:
        raise ValueError(f"veto must be above 0, got {veto}; leave it out for none")
    if (low is not None and bound == "truncate") or not 0 <= (low or 0) < high:
        raise ValueError(f"{bound} with low {low}, high {high}: truncate takes high alone, mask 0 <= low < high")

    old, rollout = old_logprobs.detach()[mask].double(), rollout_logprobs.detach()[mask].double()
    d = log_ratios = old - rollout
    if level != "token":
        log_ratios = sequence_reduced(d, mask, cu_seqlens, "sum" if level == "sequence" else "mean")
    ratios = log_ratios.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()

    is_outside = (ratios > high) | (ratios < (low or 0))
    kept = ratios.clamp(max=high) if bound == "truncate" else ratios.masked_fill(is_outside, 0.0)
    is_vetoed = torch.zeros_like(is_outside)
    if veto is not None:
        is_vetoed = sequence_reduced(d, mask, cu_seqlens, "min") < math.log(veto)
    kept = kept.masked_fill(is_vetoed, 0.0)
    sums = {
        "num_tokens": mask.sum(),
        "weight": kept.sum(),
        "weight_squared": kept.square().sum(),
        "weight_max": kept.max() if len(kept) else kept.new_zeros(()),
        "truncated": (is_outside & (kept > 0)).sum(),
        "rejected": (kept == 0).sum(),
        "vetoed": is_vetoed.sum(),
        "rollout_kl_k1": kl(rollout, old, kind="k1").sum(),
        "rollout_kl_k3": kl(rollout, old, kind="k3").sum(),
    }
    weights = torch.zeros_like(old_logprobs).masked_scatter_(mask, kept.to(old_logprobs.dtype))
    return weights, {name: value.double() for name, value in sums.items()}
