"""The processes that share one loss: all have the whole step, each computes its share, and sums make them one again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist

from stenograph.algorithms.statistics import reduce_sums
from stenograph.training.batch import SIGNALS, TokenArrays, flat, spread
from stenograph.training.packing import Pack


class Ranks:
    """`process_group` None: this process alone. Every rank has to make the same calls in the same order."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.size = 1 if process_group is None else dist.get_world_size(process_group)

    def deal(self, packs: Sequence[Pack]) -> Iterator[tuple[Pack, bool]]:
        """This rank's packs, and whether each is its own.

        All ranks get equally many, since collectives may hide in a model's passes: where the packs run out, one gets
        another's without loss, for whose results nobody asks.
        """
        for first in range(0, len(packs), self.size):
            own = first + self.rank
            if own < len(packs):
                yield packs[own], True
            else:
                yield packs[first].without_loss(), False

    def gather(self, sequences: Sequence[TokenArrays], name: str) -> None:
        """Complete a signal that each rank has filled for its own packs; elsewhere it still has to be 0."""
        assert SIGNALS[name].padding == 0
        spread(self.total(flat(sequences, name)), sequences, name)

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        return values

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give every rank the sum of all gradients; a parameter that has none on any rank gets none."""
        if self._group is None:
            return
        counts = self.total(torch.tensor([float(parameter.grad is not None) for parameter in parameters]))
        for parameter, count in zip(parameters, counts.tolist(), strict=True):
            if count:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad, group=self._group)

    def reduce(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `merge_sums`, over ranks."""
        return dict(sums) if self._group is None else reduce_sums(sums, self._group)
