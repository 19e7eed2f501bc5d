"""Phases of a training step: what the one that is entered needs is on the device, and with `offload` nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Literal

import torch
from torch import nn

from stenograph.errors import CheckpointError
from stenograph.training.updates import Updates

Place = Callable[[str, bool], None]  # (part, whether it belongs on the device)
Phase = Literal["rollout", "score", "value", "train_critic", "train_actor", "publish"]

# What is computed in a phase, and by which parts.
_NEEDS: dict[Phase, frozenset[str]] = {
    "rollout": frozenset(),  # and the actor, where the engine serves its very weights
    "score": frozenset({"actor", "reference"}),  # old and reference log-probabilities
    "value": frozenset({"critic"}),
    "train_critic": frozenset({"critic", "critic_optimizer"}),
    "train_actor": frozenset({"actor", "actor_optimizer"}),
    "publish": frozenset({"actor"}),
}
_PARTS = frozenset().union(*_NEEDS.values())

# What may follow a phase. A step goes forward and may leave phases out; it ends in new rollouts from anywhere, for in
# the critic's warm-up, or where no update was applied, there is nothing to publish. A resumed run publishes first.
_NEXT: dict[Phase | None, tuple[Phase, ...]] = {
    None: ("rollout", "publish"),
    "rollout": ("score", "value", "train_critic", "train_actor"),
    "score": ("rollout", "value", "train_critic", "train_actor", "publish"),
    "value": ("rollout", "train_critic", "train_actor", "publish"),
    "train_critic": ("rollout", "train_actor", "publish"),
    "train_actor": ("rollout", "publish"),
    "publish": ("rollout",),
}


class Phases:
    """Which phase a run is in, and which parts are on the device for it.

    Parts are "actor", "critic", "reference", and the moments of the first two, "actor_optimizer" and
    "critic_optimizer". Without `offload` all are resident all the time, and nothing is ever moved. With it none is
    until the first phase, and what a phase has no use for leaves before what it needs comes.
    """

    def __init__(
        self,
        place: Place,
        *,
        offload: bool,
        parts: Iterable[str],
        engine_shares_weights: bool,
    ) -> None:
        """`place(part, resident)` moves a part to the device or off it. Raises ValueError for an unknown part."""
        self._parts = frozenset(parts)
        if unknown := self._parts - _PARTS:
            raise ValueError(f"no phase needs {', '.join(sorted(unknown))}; parts are {', '.join(sorted(_PARTS))}")
        self._place = place
        self._offload = offload
        self._engine_shares_weights = engine_shares_weights
        self.current: Phase | None = None  # until the first
        self.resident = self._parts
        if offload:
            self._make_resident(frozenset())

    def enter(self, phase: Phase) -> None:
        """Go on to `phase`; nothing happens where the run is in it. Raises RuntimeError for one that may not follow."""
        if phase == self.current:
            return
        legal = _NEXT[self.current]
        if phase not in legal:
            raise RuntimeError(
                f"phase {phase} cannot follow {self.current or 'the start'}, only {' or '.join(legal)} can"
            )
        if self._offload:
            self._make_resident(self._needs(phase))
        self.current = phase

    def check_save(self) -> None:
        """Raises CheckpointError amid a step: what would be saved is neither from before it nor from after it."""
        if self.current not in (None, "rollout"):
            raise CheckpointError(
                f"cannot save a checkpoint in phase {self.current}, amid a step; save where the next rollouts begin"
            )

    def _needs(self, phase: Phase) -> frozenset[str]:
        serves = {"actor"} if phase == "rollout" and self._engine_shares_weights else set()
        return self._parts & (_NEEDS[phase] | serves)

    def _make_resident(self, parts: frozenset[str]) -> None:
        for part in sorted(self.resident - parts):
            self._place(part, False)
            self.resident -= {part}
        for part in sorted(parts - self.resident):
            self._place(part, True)
            self.resident |= {part}


def mover(device: str | torch.device, modules: Mapping[str, nn.Module], updates: Mapping[str, Updates]) -> Place:
    """The placement of `Phases` between `device` and main memory; where both are the same nothing moves.

    `modules` and `updates` are by model: the part "critic_optimizer" is the moments of `updates["critic"]`. Parameters
    and buffers stay the tensors that they are, so that an engine which shares them finds them wherever they are.
    """
    device = torch.device(device)

    def place(part: str, resident: bool) -> None:
        target = device if resident else torch.device("cpu")
        if part.endswith("_optimizer"):
            updates[part.removesuffix("_optimizer")].move(target)
        else:  # nn.Module.to would replace the buffers
            for tensor in chain(modules[part].parameters(), modules[part].buffers()):
                tensor.data = tensor.data.to(target)
        if device.type == "cuda" and not resident:
            torch.cuda.empty_cache()  # the engine may be another process

    return place
