"""Advantages of whole rollouts: a group whose rewards are all equal teaches nothing, exactly 0."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline"]

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
    lengths    [rollouts] sampled tokens of each; `opo` alone reads them.
    k          attempts of which the best counts; `pass_at_k` alone reads it. A group smaller than k gets 0.
    Returns    [rollouts] in the dtype of `rewards`, computed in float64; in the unit of the rewards by `dr_grpo`,
               `rloo` and `opo`, else in standard deviations. A group of one, and a group of equal rewards, gets exactly
               0; for `reinforce_pp` all rollouts are one group.

    With std that divides by n - 1, and 1e-6 added to every std:
    grpo: (r_i - mean) / std. Shao et al. 2024, "DeepSeekMath" (arXiv:2402.03300), 4.1.2.
    dr_grpo: r_i - mean. Liu et al. 2025 (arXiv:2503.20783), 3.2.
    rloo: r_i - mean of the others' r. Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740), 3.
    opo: r_i - mean weighted by length. Hao et al. 2025 (arXiv:2505.23585), "Optimal Reward Baseline".
    pass_at_k: (mean of the best reward over the sets of k that have i in them - over all sets of k) / its standard
        deviation over these. Chen et al. 2025 (arXiv:2508.10751), "Analytical Derivation", for rewards 0 and 1; any
        others by the order of rewards, as in Walder and Karkhanis 2025 (arXiv:2505.15201).
    reinforce_pp: (r_i - mean) / std over all rollouts. Hu 2025, "REINFORCE++" (arXiv:2501.03262).
    reinforce_pp_baseline: r_i - mean, divided by the std of these over all rollouts. The same.

    Raises ValueError for an unknown kind, arguments that the kind does not read or lacks, lengths and rewards that do
    not fit, and rewards that are not finite.
    """
    exact, sizes = _checked(rewards, kind, lengths, k)
    groups = group_ids.tolist() if isinstance(group_ids, Tensor) else list(group_ids)
    if len(groups) != len(rewards):
        raise ValueError(f"{len(groups)} group ids for rewards of shape {tuple(rewards.shape)}; give one per rollout")
    if kind == "reinforce_pp":
        groups = [None] * len(groups)

    members: dict[Hashable, list[int]] = {}
    for rollout, group in enumerate(groups):
        members.setdefault(group, []).append(rollout)

    advantages = torch.zeros_like(exact)
    for rollouts in members.values():
        r = exact[rollouts]  # [group]
        if r.min() == r.max():  # also a group of one; the mean of equal rewards need not equal them (7 x 0.7)
            continue
        if kind in ("grpo", "reinforce_pp"):
            advantages[rollouts] = (r - r.mean()) / (r.std(correction=1) + _EPSILON)
        elif kind == "rloo":
            advantages[rollouts] = r - (r.sum() - r) / (len(r) - 1)
        elif kind == "opo" and sizes is not None:
            advantages[rollouts] = r - (sizes[rollouts] * r).sum() / sizes[rollouts].sum()
        elif kind == "pass_at_k" and k is not None:
            advantages[rollouts] = _pass_at_k(r, k)
        else:
            advantages[rollouts] = r - r.mean()
    if kind == "reinforce_pp_baseline" and len(advantages) > 1:
        advantages /= advantages.std(correction=1) + _EPSILON
    return advantages.to(rewards.dtype)


def _checked(rewards: Tensor, kind: str, lengths: Tensor | None, k: int | None) -> tuple[Tensor, Tensor | None]:
    """Rewards and lengths in float64."""
    if kind not in get_args(AdvantageKind):
        raise ValueError(f"unknown advantage kind {kind!r}; known: {', '.join(get_args(AdvantageKind))}")
    for name, value, reader in (("lengths", lengths, "opo"), ("k", k, "pass_at_k")):
        if kind == reader and value is None:
            raise ValueError(f"advantage kind {kind!r} needs `{name}`")
        if kind != reader and value is not None:
            raise ValueError(f"advantage kind {kind!r} does not read `{name}`; leave it out")
    if k is not None and k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    exact = rewards.detach().double()
    if exact.ndim != 1 or not exact.isfinite().all():
        raise ValueError(
            f"rewards must be finite, one per rollout, got {rewards.tolist()}; have the judge return a number"
        )
    if lengths is not None and (lengths.shape != rewards.shape or not (lengths > 0).all()):
        raise ValueError(f"lengths must be above 0, one for each of {len(rewards)} rollouts, got {lengths.tolist()}")
    return exact, None if lengths is None else lengths.to(exact)


def _pass_at_k(r: Tensor, k: int) -> Tensor:
    """[group]: what each rollout adds to the best of k, in standard deviations of the best of k."""
    n = len(r)
    ranked, order = r.sort()
    if n < k or ranked[k - 1] == ranked[-1]:  # all sets of k have the same best
        return torch.zeros_like(r)

    # The sets whose best is at rank j: it, and k - 1 of the j below; with i < j in them, k - 2 of the j - 1 others.
    share = _shares([math.comb(j, k - 1) for j in range(n)], math.comb(n, k)).to(r)
    share_with_lower = _shares(
        [math.comb(j - 1, k - 2) if j and k > 1 else 0 for j in range(n)], math.comb(n - 1, k - 1)
    )
    share_as_best = _shares([math.comb(j, k - 1) for j in range(n)], math.comb(n - 1, k - 1)).to(r)
    above = (share_with_lower.to(r) * ranked).flip(0).cumsum(0).flip(0).roll(-1)
    above[-1] = 0.0
    with_i = share_as_best * ranked + above

    mean = (share * ranked).sum()
    std = (share * (ranked - mean).square()).sum().sqrt()
    return torch.empty_like(r).scatter_(0, order, (with_i - mean) / (std + _EPSILON))


def _shares(counts: list[int], total: int) -> Tensor:
    """Python's integers are exact where binomials are not floats any more."""
    return torch.tensor([count / total for count in counts], dtype=torch.float64)
