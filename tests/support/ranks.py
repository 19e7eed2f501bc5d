"""A function run by several processes that share a gloo group, each with its own share of the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import distributed as dist

from stenograph.algorithms.statistics import explained_variance, masked_mean, reduce_sums, value_sums, whiten


def on_ranks(function: Callable[..., Any], shares: Sequence[tuple[Any, ...]], folder: Path) -> list[Any]:
    """What `function(group, *share)` returned on each rank; `folder` is where they find one another."""
    with mp.get_context("spawn").Pool(len(shares)) as pool:
        address = f"file://{folder}/group"
        begun: list[AsyncResult[Any]] = [
            pool.apply_async(_run, (function, address, rank, len(shares), share)) for rank, share in enumerate(shares)
        ]
        return [result.get(90) for result in begun]


def _run(function: Callable[..., Any], address: str, rank: int, num_ranks: int, share: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    try:
        return function(dist.group.WORLD, *share)
    finally:
        dist.destroy_process_group()


def measured(
    group: dist.ProcessGroup | None, x: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor
) -> dict[str, Any]:
    """What the statistics come to, over the ranks of the group."""
    sums = value_sums(x, returns, mask) | {"value_max": x[mask].max() if mask.any() else x.new_tensor(-torch.inf)}
    return {
        "whitened": whiten(x, mask, process_group=group).tolist(),
        "mean": masked_mean(x, mask, process_group=group).item(),
        "explained_variance": explained_variance(x, returns, mask, process_group=group),
        "sums": {name: value.item() for name, value in (reduce_sums(sums, group) if group else sums).items()},
    }
