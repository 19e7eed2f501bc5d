"""One step in many settings, split over packs and ranks, and what it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

from stenograph.training.ranks import Ranks
from support.steps import make_trainer, moments_of, numbers, varied_rollouts


@dataclass(frozen=True, slots=True)
class Setting:
    algorithm: dict[str, Any]
    critic: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    # After one update float32 is exact to 1e-6; every further one carries the rounding of those before it on.
    dtype: torch.dtype = torch.float32


SETTINGS = {
    "grpo": Setting({"estimator": "grpo", "kl": {"placement": "loss", "kind": "k3", "beta": 0.1}}),
    "grpo, mean of sequences": Setting(
        {
            "reduction": "sequence_mean",
            "policy_loss": "gspo",
            "off_policy": {
                "level": "token",
                "bound": "mask",
                "high": 1.3,
                "low": 0.85,
                "veto": 0.8,
                "count_rejected": False,
            },
        }
    ),
    "grpo, several passes": Setting(
        {"clip_low": 0.05, "clip_high": 0.1, "clip_dual": 1.5, "off_policy": {"level": "sequence"}},
        {},
        {"num_epochs": 2, "num_minibatches": 2},
        torch.float64,
    ),
    "gae": Setting(
        {"estimator": "gae", "gamma": 0.97, "lam": 0.9, "bootstrap": "value", "kl": {"placement": "reward"}},
        {"num_epochs": 1},
    ),
    "gae, several passes": Setting(
        {
            "estimator": "gae",
            "lam": "length_adaptive",
            "critic_lam": 1.0,
            "reduction": "constant_length",
            "length": 20,
            "off_policy": {"level": "geometric", "max_staleness": 1, "count_rejected": False},
            "kl": {"placement": "loss", "beta": 0.1},
        },
        {"num_epochs": 2, "num_minibatches": 3, "value_clip": 0.05},
        {"num_epochs": 2, "num_minibatches": 2},
        torch.float64,
    ),
}


class Outcome(NamedTuple):
    """What a step came to."""

    numbers: dict[str, float]
    moments: dict[str, np.ndarray]  # after one update a tenth of the gradient
    num_forward_tokens: int


Outcomes = dict[tuple[str, int], Outcome]


def outcomes(group: dist.ProcessGroup | None, packs: Sequence[int]) -> Outcomes:
    """Of every setting, with each of these `pack_max_tokens`."""
    found: Outcomes = {}
    for name, setting in SETTINGS.items():
        for max_tokens in packs:
            trainer = make_trainer(
                setting.algorithm,
                setting.critic and {"max_grad_norm": 1e9, **setting.critic},
                dtype=setting.dtype,
                process_group=group,
                pack_max_tokens=max_tokens,
                max_grad_norm=1e9,
                **setting.training,
            )
            trainer.version = 5
            report = trainer.step(varied_rollouts())
            found[name, max_tokens] = Outcome(numbers(report), moments_of(trainer), report.num_forward_tokens)
    return found


def summed_gradients(group: dist.ProcessGroup) -> list[float | None]:
    """Of three parameters, which both ranks, the second, and neither of them have a gradient for."""
    ranks = Ranks(group)
    parameters = [nn.Parameter(torch.zeros(())) for _ in range(3)]
    for parameter in parameters[: 1 + ranks.rank]:
        parameter.grad = torch.tensor(1.0 + ranks.rank)
    ranks.add_gradients(parameters)
    return [None if parameter.grad is None else parameter.grad.item() for parameter in parameters]


def on_a_rank(group: dist.ProcessGroup, packs: Sequence[int]) -> tuple[Outcomes, list[float | None]]:
    return outcomes(group, packs), summed_gradients(group)
