"""Numbers over the tokens that a mask selects: made of sums, so that no split of a batch moves them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch import distributed as dist

# Keeps values that differ by rounding alone from being stretched to unit variance.
_EPSILON = 1e-8
# A standard deviation below this share of the mean (or of 1) is rounding; nothing is explained there.
_MIN_VARIATION = 1e-6


def merge_sums(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums of two micro-batches taken together: names that end in `_max` by maximum, the others by addition.

    Raises ValueError where they do not name the same sums.
    """
    if a.keys() != b.keys():
        raise ValueError(f"sums differ in {sorted(a.keys() ^ b.keys())}; merge those of one loss")
    return {name: torch.maximum(a[name], b[name]) if name.endswith("_max") else a[name] + b[name] for name in a}


def reduce_sums(sums: Mapping[str, Tensor], process_group: dist.ProcessGroup) -> dict[str, Tensor]:
    """The sums of all ranks taken together, as by `merge_sums`; every rank has to call, with sums of the same names."""
    reduced = {name: sums[name].detach().double().clone() for name in sorted(sums)}
    for name, value in reduced.items():
        dist.all_reduce(value, dist.ReduceOp.MAX if name.endswith("_max") else dist.ReduceOp.SUM, process_group)
    return reduced


def masked_mean(x: Tensor, mask: Tensor, *, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """The mean of `x` [tokens] over the tokens of `mask` [tokens] bool: a float64 scalar, 0 where there are none.

    process_group  ranks whose tokens count as well, each of which has to call; None: this process's alone.
    """
    count, total = _summed([mask.sum(), x.detach()[mask].double().sum()], process_group)
    return total / count.clamp(min=1)


def whiten(x: Tensor, mask: Tensor, *, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """Shift and scale to mean 0 and variance 1.

    x     [tokens] float. mask  [tokens] bool: the tokens that mean and variance are taken over, in two passes, in
          float64. What lies outside is never read.
    process_group  ranks whose tokens count as well: those that share the loss. Each has to call, also with an empty
          share; None: this process's alone.
    Returns [tokens] in the dtype of `x`, without gradient: (x - mean) / (std + 1e-8), std with n - 1, in the mask and
    exactly 0 outside. Of a single token the mean is subtracted and nothing divided.
    """
    valid = x.detach()[mask].double()
    count, total = _summed([mask.sum(), valid.sum()], process_group)
    centred = valid - total / count.clamp(min=1)
    (squares,) = _summed([centred.square().sum()], process_group)
    if count > 1:
        centred /= (squares / (count - 1)).sqrt() + _EPSILON
    return torch.zeros_like(x).masked_scatter_(mask, centred.to(x.dtype))


def sequence_reduced(x: Tensor, mask: Tensor, cu_seqlens: Tensor, kind: Literal["sum", "mean", "min"]) -> Tensor:
    """What the masked tokens of each sequence come to, for each of them.

    x  [masked tokens] float, without gradient; mask  [tokens] bool; cu_seqlens  [sequences + 1] int.
    Returns [masked tokens].
    """
    if not len(x):  # which segment_reduce refuses
        return x
    positions = mask.nonzero().squeeze(1)
    counts = torch.searchsorted(positions, cu_seqlens.to(positions)).diff()
    empty = torch.inf if kind == "min" else 0.0
    return torch.segment_reduce(x, kind, lengths=counts, initial=empty).repeat_interleave(counts)


def value_sums(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """What `explained_variance_of` reads: detached float64 sums over the tokens of `mask`, which add up.

    values, returns  [tokens] float; mask [tokens] bool. An `error` is a return less its value.
    """
    v, r = values.detach()[mask].double(), returns.detach()[mask].double()
    error = r - v
    return {
        "num_tokens": mask.sum().double(),
        "value": v.sum(),
        "return": r.sum(),
        "return_squared": r.square().sum(),
        "error": error.sum(),
        "error_squared": error.square().sum(),
    }


def explained_variance_of(sums: Mapping[str, Tensor]) -> float | None:
    """1 - Var(returns - values) / Var(returns) from the sums of a whole batch; see `value_sums`.

    None where the returns hardly vary: their standard deviation is below 1e-6 of their mean, or of 1.
    """
    n = sums["num_tokens"].item()
    if n < 2:
        return None
    mean = sums["return"].item() / n
    variance = sums["return_squared"].item() / n - mean**2
    if variance <= (_MIN_VARIATION * max(1.0, abs(mean))) ** 2:
        return None
    bias = sums["error"].item() / n
    return 1 - (sums["error_squared"].item() / n - bias**2) / variance


def explained_variance(
    values: Tensor, returns: Tensor, mask: Tensor, *, process_group: dist.ProcessGroup | None = None
) -> float | None:
    """How much of the returns' variance the values account for: 1 all, 0 no more than a constant, below 0 less.

    values, returns  [tokens] float; mask [tokens] bool, what lies outside is never read.
    process_group    as in `whiten`. Returns None where the returns hardly vary; see `explained_variance_of`.
    """
    sums = value_sums(values, returns, mask)
    return explained_variance_of(sums if process_group is None else reduce_sums(sums, process_group))


def _summed(values: list[Tensor], process_group: dist.ProcessGroup | None) -> Tensor:
    sums = torch.stack([value.double() for value in values])
    if process_group is not None:
        dist.all_reduce(sums, group=process_group)
    return sums
