"""One model's passes over a step's rollouts: an update a mini-batch, whatever packs and ranks it is split over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stenograph.config_training import OptimizerConfig
from stenograph.training.batch import TokenArrays, num_trainable
from stenograph.training.credit import Attempt
from stenograph.training.packing import Pack
from stenograph.training.passes import Passes
from stenograph.training.report import Tally
from stenograph.training.updates import Updates

ModelName = Literal["actor", "critic"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A pack of a mini-batch, for its loss."""

    pack: Pack
    is_own: bool  # else another rank's, without loss
    sequences: Sequence[TokenArrays]  # those that the pack's indices mean
    share: float  # of the mini-batch's packed tokens
    denominator: float  # of the mini-batch, as the objective says
    num_tokens: int  # of the mini-batch, trainable
    epoch: int


@dataclass(frozen=True, slots=True)
class Objective:
    """What a model is trained for."""

    loss: Callable[[MicroBatch], Tensor]
    denominator: Callable[[Sequence[TokenArrays]], float]  # of a mini-batch; 0: nothing in it is trainable
    is_computed: Callable[[TokenArrays], bool]  # whether a sequence can have a gradient


@dataclass(slots=True)
class Learnt:
    """What became of a model's updates."""

    num_updates: int = 0  # applied
    grad_norms: list[float] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


class Learner:
    """Owns a model's optimizer; `learn` makes one step's updates."""

    def __init__(
        self, name: ModelName, model: PreTrainedModel, config: OptimizerConfig, num_steps: int, passes: Passes
    ) -> None:
        self._name: ModelName = name
        self._passes = passes
        self._num_epochs = config.num_epochs
        self._num_minibatches = config.num_minibatches
        self.updates = Updates(model, config, num_steps * config.num_epochs * config.num_minibatches)

    def is_single_pass(self, num_attempts: int) -> bool:
        """Whether a step is one update: what its forward pass says is what was frozen before it."""
        return self._num_epochs == 1 == min(self._num_minibatches, max(1, num_attempts))

    def learn(
        self,
        attempts: Sequence[Attempt],
        sequences: Sequence[TokenArrays],
        objective: Objective,
        rng: np.random.Generator,
        tally: Tally,
    ) -> Learnt:
        """Rollouts stay whole; every epoch has an order of its own."""
        learnt = Learnt()
        num_minibatches = min(self._num_minibatches, max(1, len(attempts)))
        for epoch in range(self._num_epochs):
            for chosen in np.array_split(rng.permutation(len(attempts)), num_minibatches):
                samples = sorted(n for attempt in chosen for n in attempts[attempt].samples)
                self._update([sequences[n] for n in samples], objective, epoch, tally, learnt)
        return learnt

    def _update(
        self, minibatch: list[TokenArrays], objective: Objective, epoch: int, tally: Tally, learnt: Learnt
    ) -> None:
        denominator = objective.denominator(minibatch)
        computed = [arrays for arrays in minibatch if objective.is_computed(arrays)]
        if denominator == 0 or not computed:
            reason = "no trainable tokens" if denominator == 0 else "every gradient is 0"
            self.updates.skip(reason)
            learnt.skipped.append(self._told(reason))
            return

        packs = list(self._passes.packs(computed))
        own_tokens = torch.tensor(sum(pack.num_tokens for pack, is_own in packs if is_own))
        num_tokens = int(self._passes.ranks.total(own_tokens))
        tally.num_forward_tokens += num_tokens
        for pack, is_own in packs:
            share = pack.num_tokens / num_tokens if is_own else 0.0
            loss = objective.loss(
                MicroBatch(pack, is_own, computed, share, denominator, num_trainable(minibatch), epoch)
            )
            loss.backward()
            tally.add(self._name, {"loss": loss})
        tally.add(self._name, {"updates": torch.tensor(float(self._passes.ranks.rank == 0))})
        self._passes.ranks.add_gradients(self.updates.parameters)
        applied = self.updates.apply()
        learnt.grad_norms.append(applied.grad_norm)
        if applied.reason is None:
            learnt.num_updates += 1
        else:
            learnt.skipped.append(self._told(applied.reason))

    def _told(self, reason: str) -> str:
        return reason if self._name == "actor" else f"{self._name}: {reason}"
