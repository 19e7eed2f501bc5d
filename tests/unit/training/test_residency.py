"""Where a step computes, only what it computes with is on the device; everything is back for the next rollouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stenograph.config import Config
from stenograph.training.critic import critic_from_actor
from stenograph.training.trainer import Trainer
from support.models import tiny_model
from support.samples import random_groups

KL = {"kl": {"placement": "reward"}}


class Device:
    """A placement that moves nothing and knows what would be where."""

    def __init__(self) -> None:
        self.holds: set[str] = set()
        self.moves: list[tuple[str, bool]] = []

    def __call__(self, part: str, resident: bool) -> None:
        self.moves.append((part, resident))
        (self.holds.add if resident else self.holds.discard)(part)


def training(device: Device, algorithm: dict[str, Any], critic: dict[str, Any] | None = None) -> Trainer:
    config = Config.model_validate(
        {
            "algorithm": {"estimator": "gae", **algorithm},
            "critic": critic or {},
            "training": {"offload": True, "device": "cpu", "num_epochs": 2},
        }
    )
    actor = tiny_model()
    reference = tiny_model() if algorithm else None
    return Trainer(actor, config, critic=critic_from_actor(actor, seed=0), reference=reference, place=device)


def watched(trainer: Trainer, device: Device) -> list[tuple[str, frozenset[str]]]:
    """What the device holds whenever a model computes, or an optimizer steps."""
    seen: list[tuple[str, frozenset[str]]] = []

    def note(name: str) -> None:
        if not seen or seen[-1] != (name, frozenset(device.holds)):
            seen.append((name, frozenset(device.holds)))

    def on_forward(name: str, model: nn.Module) -> None:
        model.register_forward_pre_hook(lambda *_: note(name))

    models = {"actor": trainer.model, "critic": trainer.critic, "reference": trainer._reference}
    for name, model in models.items():
        if model is not None:
            on_forward(name, model)
    for name, updates in trainer.updates.items():
        updates.optimizer.register_step_pre_hook(lambda *_, name=name: note(f"{name}_optimizer"))
    return seen


def test_each_pass_has_the_device_to_itself() -> None:
    device = Device()
    trainer = training(device, KL)
    seen = watched(trainer, device)
    trainer.step(random_groups())
    scored, critic, actor = (
        frozenset({"actor", "reference"}),
        frozenset({"critic", "critic_optimizer"}),
        frozenset({"actor", "actor_optimizer"}),
    )
    train_critic = [("critic", critic), ("critic_optimizer", critic)] * 2
    train_actor = [("actor", actor), ("actor_optimizer", actor)] * 2
    assert seen == [
        ("actor", scored),
        ("reference", scored),
        ("critic", frozenset({"critic"})),
        *train_critic,
        *train_actor,
    ]


def test_the_next_rollouts_find_the_actor_and_nothing_else() -> None:
    device = Device()
    trainer = training(device, KL)
    trainer.step(random_groups())
    trainer.phases.enter("publish")
    trainer.phases.enter("rollout")
    assert device.holds == {"actor"}
    before = len(device.moves)
    trainer.phases.enter("rollout")
    assert len(device.moves) == before


def test_a_warm_up_leaves_the_actor_off_the_device() -> None:
    device = Device()
    trainer = training(device, {}, {"warmup_steps": 1})
    trainer.phases.enter("rollout")
    seen = watched(trainer, device)
    trainer.step(random_groups())
    assert {name for name, _ in seen} == {"critic", "critic_optimizer"}
    assert all("actor" not in holds for _, holds in seen)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_offloaded_run_is_the_run_that_has_everything_on_the_device() -> None:
    weights = []
    for offload in (False, True):
        config = Config.model_validate(
            {"algorithm": {"estimator": "gae"}, "training": {"offload": offload, "device": "cuda", "num_epochs": 2}}
        )
        actor = tiny_model()
        trainer = Trainer(actor, config, critic=critic_from_actor(actor, seed=0))
        for seed in (1, 2):
            trainer.step(random_groups(seed))
            trainer.phases.enter("rollout")
        weights.append([tensor.cpu() for _, tensor in trainer.weights.tensors()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
