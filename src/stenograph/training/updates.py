"""A model's updates: each is applied whole or not at all, and counted; one that is skipped leaves no trace but that."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from stenograph.config_training import OptimizerConfig
from stenograph.errors import CheckpointError
from stenograph.training.schedules import schedule


@dataclasses.dataclass(frozen=True, slots=True)
class Applied:
    """What became of the gradients: `grad_norm` is that before clipping, `reason` why the update was skipped."""

    grad_norm: float
    reason: str | None  # None: applied


class Updates:
    """AdamW on the trainable parameters of one model, at a rate that follows from the number of applied updates.

    `applied` and `skipped` (by reason) are its ledger.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, num_updates: int) -> None:
        """`num_updates` is how many the schedule is for; more may be made."""
        self._config = config
        self._num_updates = num_updates
        self.parameters: list[nn.Parameter] = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.lr,
            betas=(0.9, 0.999),
            weight_decay=config.weight_decay,
            fused=True,  # one pass over the weights; the others make ten
        )
        self._schedule = schedule(self.optimizer, config, num_updates)
        self.skipped: dict[str, int] = Counter()

    @property
    def applied(self) -> int:
        return self._schedule.last_epoch

    @property
    def attempted(self) -> int:
        return self.applied + sum(self.skipped.values())

    @property
    def lr(self) -> float:
        """Of the next update."""
        return self.optimizer.param_groups[0]["lr"]

    def apply(self) -> Applied:
        """One update from the gradients that the parameters have, summed over packs and ranks; they are gone after it.

        It is skipped where they are not finite, or have a norm above `max_grad_norm_skip`: weights, moments and rate
        are then what they were.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        grad_norm = norm.item()
        outcome = Applied(grad_norm, self._objection(grad_norm))
        if outcome.reason is not None:
            self.skip(outcome.reason)
            return outcome
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self._config.max_grad_norm, norm)
        self.optimizer.step()
        self._schedule.step()
        self.optimizer.zero_grad()
        return outcome

    def skip(self, reason: str) -> None:
        """Count an update that is not made, and drop the gradients."""
        self.skipped[reason] += 1
        self.optimizer.zero_grad()

    def optimizer_state(self) -> dict[str, Any]:
        """The moments by parameter, {} for one that never had a gradient; not copied, so valid until the next update.

        Hyperparameters are the configuration's, and not in it.
        """
        return {"state": [self.optimizer.state.get(p, {}) for p in self.parameters]}

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Take copies of the moments, each to the device and in the precision of its parameter.

        Raises CheckpointError for those of another model; nothing is changed then.
        """
        if "state" not in state:
            warnings.warn("the checkpoint has no moments; the optimizer keeps its own", stacklevel=2)
            return
        entries: list[dict[str, Tensor]] = state["state"]
        self._check_shapes(entries)
        self.optimizer.state.clear()
        for parameter, entry in zip(self.parameters, entries, strict=True):
            if entry:
                self.optimizer.state[parameter] = {
                    name: value.to(parameter.device, value.dtype if name == "step" else parameter.dtype, copy=True)
                    for name, value in entry.items()
                }

    def schedule_state(self) -> dict[str, Any]:
        """The ledger, which the rate follows from."""
        return {"applied": self.applied, "skipped": dict(self.skipped)}

    def load_schedule(self, state: dict[str, Any]) -> None:
        """Go on from a ledger: the next update has the rate that this configuration gives it."""
        if missing := sorted(self.schedule_state().keys() - state.keys()):
            kept = ", ".join(f"{name} = {getattr(self, name)}" for name in missing)
            warnings.warn(f"the checkpoint lacks counts of updates; going on with {kept}", stacklevel=2)
        self.skipped = Counter(state.get("skipped", self.skipped))
        self._schedule = schedule(
            self.optimizer, self._config, self._num_updates, applied=state.get("applied", self.applied)
        )

    def move(self, device: str | torch.device) -> None:
        """The moments, not the parameters, to `device`; those that are there already stay where they are."""
        for entry in self.optimizer.state.values():
            for name, value in entry.items():
                entry[name] = value.to(device)

    def _objection(self, grad_norm: float) -> str | None:
        limit = self._config.max_grad_norm_skip
        if not math.isfinite(grad_norm):
            return "gradient is not finite"
        if limit is not None and grad_norm > limit:
            return "gradient norm over max_grad_norm_skip"
        return None

    def _check_shapes(self, entries: list[dict[str, Tensor]]) -> None:
        if len(entries) != len(self.parameters):
            raise CheckpointError(
                f"the checkpoint has moments of {len(entries)} parameters, the model trains {len(self.parameters)}; "
                "load those of this model, or leave the optimizer out"
            )
        for n, (entry, parameter) in enumerate(zip(entries, self.parameters, strict=True)):
            found = {name: tuple(value.shape) for name, value in entry.items()}
            expected = {"step": (), "exp_avg": tuple(parameter.shape), "exp_avg_sq": tuple(parameter.shape)}
            if found and found != expected:
                raise CheckpointError(
                    f"the checkpoint's moments of parameter {n} are {found}, the model's are {expected}; "
                    "load those of this model, or leave the optimizer out"
                )
