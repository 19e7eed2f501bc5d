"""Advantages of whole rollouts: a group whose rewards are all equal teaches nothing, exactly 0."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

AdvantageKind = Literal["grpo", "rloo"]

# Keeps rewards that differ by rounding alone from being stretched to unit variance.
_EPSILON = 1e-6


def group_advantages(
    rewards: Tensor,
    group_ids: Sequence[Hashable] | Tensor,
    *,
    kind: AdvantageKind,
    lengths: Tensor | None = None,
    k: int | None = None,
) -> Tensor:
    """One advantage per rollout, from the rewards of its group.

    rewards    [rollouts] float, in the judge's unit.
    group_ids  [rollouts] anything that compares equal within a group; order and adjacency do not matter.
    lengths, k  for kinds that read them; none of the present ones does, so giving them is an error.
    Returns    [rollouts] in the dtype of `rewards`, computed in float64; `grpo` is in standard deviations, `rloo` in
               the unit of the rewards. A group of one, and a group of equal rewards, gets exactly 0.

    grpo: (r_i - mean) / (std + 1e-6), std with n - 1. Shao et al. 2024, "DeepSeekMath" (arXiv:2402.03300), 4.1.2.
    rloo: r_i - mean of the others' r. Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740), 3.

    Raises ValueError for an unknown kind, arguments that the kind does not read, unequal lengths and rewards that are
    not finite.
    """
    if kind not in ("grpo", "rloo"):
        raise ValueError(f"unknown advantage kind {kind!r}; known: grpo, rloo")
    if lengths is not None or k is not None:
        raise ValueError(f"advantage kind {kind!r} reads neither `lengths` nor `k`; leave them out")
    groups = group_ids.tolist() if isinstance(group_ids, Tensor) else list(group_ids)
    if rewards.ndim != 1 or len(groups) != len(rewards):
        raise ValueError(f"{len(groups)} group ids for rewards of shape {tuple(rewards.shape)}; give one per rollout")
    exact = rewards.detach().double()
    if not exact.isfinite().all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}; have the judge return a number")

    members: dict[Hashable, list[int]] = {}
    for rollout, group in enumerate(groups):
        members.setdefault(group, []).append(rollout)

    advantages = torch.zeros_like(exact)
    for rollouts in members.values():
        r = exact[rollouts]  # [group]
        if r.min() == r.max():  # also a group of one; the mean of equal rewards need not equal them (7 x 0.7)
            continue
        n = len(rollouts)
        if kind == "grpo":
            advantages[rollouts] = (r - r.mean()) / (r.std(correction=1) + _EPSILON)
        else:
            advantages[rollouts] = r - (r.sum() - r) / (n - 1)
    return advantages.to(rewards.dtype)
