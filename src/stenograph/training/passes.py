"""A model's passes over a step's sequences: packed, shared out to the ranks, and complete again on every one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stenograph.config_training import TrainingConfig
from stenograph.training.batch import TokenArrays
from stenograph.training.critic import ValueModel
from stenograph.training.forward import PackValues, target_logprobs, target_values
from stenograph.training.packing import Pack, TargetMask, pack
from stenograph.training.ranks import Ranks


class Passes:
    """How passes are made, whichever model makes them."""

    def __init__(self, config: TrainingConfig, device: torch.device, ranks: Ranks) -> None:
        self.device = device
        self.ranks = ranks
        self._max_tokens = config.pack_max_tokens
        self._autocast = None if config.autocast is None else getattr(torch, config.autocast)

    def packs(self, sequences: Sequence[TokenArrays], targets: TargetMask = "loss_mask") -> Iterator[tuple[Pack, bool]]:
        """This rank's packs, and whether each is its own; see `Ranks.deal`."""
        yield from self.ranks.deal(pack(sequences, self._max_tokens, targets))

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The precision of forward passes."""
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)

    def signal(self, micro_batch: Pack, name: str) -> Tensor:
        return torch.from_numpy(micro_batch.signals[name]).to(self.device)

    @torch.no_grad()
    def fill_logprobs(self, model: PreTrainedModel, sequences: Sequence[TokenArrays], name: str) -> None:
        """Log-probabilities of all trainable tokens, as the signal `name`."""
        for micro_batch, is_own in self.packs(sequences):
            with self.autocast():
                logprobs = target_logprobs(model, micro_batch)
            if is_own:
                micro_batch.scatter(logprobs.cpu().numpy(), sequences, name)
        self.ranks.gather(sequences, name)

    @torch.no_grad()
    def fill_values(self, critic: ValueModel, sequences: Sequence[TokenArrays]) -> Tensor:
        """Values of all actions, as the signal "values"; returns those after each sequence's end: [sequences]."""
        at_ends = torch.zeros(len(sequences))
        for micro_batch, is_own in self.packs(sequences, "action_mask"):
            with self.autocast():
                output: PackValues = target_values(critic, micro_batch)
            if is_own:
                micro_batch.scatter(output.values.cpu().numpy(), sequences, "values")
                at_ends[list(micro_batch.sequences)] = output.at_ends.cpu()
        self.ranks.gather(sequences, "values")
        return self.ranks.total(at_ends)
