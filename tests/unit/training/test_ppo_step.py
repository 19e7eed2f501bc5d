"""A whole step of PPO equals what its definitions come to, sample by sample and token by token in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stenograph.training.critic import ValueModel, critic_from_actor
from stenograph.types import Sample
from support.steps import actor_and_reference, arrays, make_trainer, varied_rollouts

GAMMA, LAM, BETA = 0.97, 0.9, 0.1
CLIP, VALUE_CLIP = 0.05, 0.1
LR, CRITIC_LR = 1e-3, 1e-2
NUM_EPOCHS = 2
F64 = torch.float64


@dataclass
class Reference:
    """What the definitions come to; tokens by sample, 0 where there is nothing."""

    kl: float
    rewards: list[Tensor]
    values: list[Tensor]
    advantages: list[Tensor]
    returns: list[Tensor]
    policy_losses: list[float] = field(default_factory=list)  # of each update
    critic_losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    critic_grad_norms: list[float] = field(default_factory=list)
    num_clipped: int = 0
    num_values_clipped: int = 0


def logprobs_of(model: nn.Module, sample: Sample) -> Tensor:
    """[tokens], at the temperature that each was sampled at; 0 where none was."""
    ids = torch.from_numpy(sample.ids).long()
    logits = model(input_ids=ids[None]).logits[0]
    found = [torch.zeros((), dtype=F64)] * len(ids)
    for turn in sample.turns:
        for t in range(turn.start, turn.end):
            found[t] = torch.log_softmax(logits[t - 1] / turn.temperature, -1)[ids[t]]
    return torch.stack(found)


def values_of(critic: ValueModel, sample: Sample) -> Tensor:
    """[tokens]: of the state after each."""
    hidden = critic.backbone(input_ids=torch.from_numpy(sample.ids).long()[None], use_cache=False).last_hidden_state
    return hidden[0] @ critic.value_head.weight[0].double()


def earned(sample: Sample, old: Tensor, ref: Tensor) -> Tensor:
    """[tokens]: the reward of the rollout and of its turns, less what it cost to move away from the reference."""
    actions = np.flatnonzero(sample.versions >= 0)
    rewards = torch.zeros(len(sample.ids), dtype=F64)
    rewards[actions[-1]] += sample.reward or 0.0
    for turn in sample.turns:
        rewards[turn.end - 1] += turn.reward or 0.0
    for t in np.flatnonzero(sample.loss_mask):
        rewards[t] -= BETA * (old[t] - ref[t])
    return rewards


def estimated(sample: Sample, rewards: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[tokens] each: values, advantages and returns of the actions."""
    actions = np.flatnonzero(sample.versions >= 0)
    values, advantages = torch.zeros(len(sample.ids), dtype=F64), torch.zeros(len(sample.ids), dtype=F64)
    is_cut = sample.turns[-1].ended_by == "length"
    next_value, next_advantage = states[-1] if is_cut else torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)
    for t in reversed(actions):
        values[t] = states[t - 1]
        next_advantage = rewards[t] + GAMMA * next_value - values[t] + GAMMA * LAM * next_advantage
        advantages[t], next_value = next_advantage, values[t]
    return values, advantages, advantages + values


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """One update; returns the norm of its gradient."""
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return norm.item()


def reference_step(samples: list[Sample]) -> Reference:
    actor, reference = actor_and_reference(F64)
    critic = critic_from_actor(actor, seed=1)
    masks = [torch.from_numpy(sample.loss_mask) for sample in samples]
    mask = torch.cat(masks)
    with torch.no_grad():
        old = [logprobs_of(actor, sample) for sample in samples]
        ref = [logprobs_of(reference, sample) for sample in samples]
        rewards = [earned(s, o, r) for s, o, r in zip(samples, old, ref, strict=True)]
        estimates = [estimated(s, r, values_of(critic, s)) for s, r in zip(samples, rewards, strict=True)]
    old_values, advantages, returns = (list(part) for part in zip(*estimates, strict=True))
    trained = torch.cat(advantages)[mask]
    advantages = [
        torch.where(m, (a - trained.mean()) / (trained.std() + 1e-8), 0.0)
        for a, m in zip(advantages, masks, strict=True)
    ]
    found = Reference((torch.cat(old) - torch.cat(ref))[mask].mean().item(), rewards, old_values, advantages, returns)

    optimizer = torch.optim.AdamW(critic.parameters(), lr=CRITIC_LR, weight_decay=0.0)
    target, before = torch.cat(returns)[mask], torch.cat(old_values)[mask]
    for _ in range(NUM_EPOCHS):
        values = torch.cat([values_of(critic, s).roll(1) for s in samples])[mask]
        moved = before + (values - before).clamp(-VALUE_CLIP, VALUE_CLIP)
        errors, bounded = (values - target) ** 2, (moved - target) ** 2
        loss = 0.5 * torch.maximum(errors, bounded).mean()
        found.num_values_clipped += int((bounded > errors).sum())
        found.critic_losses.append(loss.item())
        found.critic_grad_norms.append(descend(critic, optimizer, loss))

    optimizer = torch.optim.AdamW(actor.parameters(), lr=LR, weight_decay=0.0)
    advantage = torch.cat(advantages)[mask]
    for _ in range(NUM_EPOCHS):
        ratio = (torch.cat([logprobs_of(actor, s) for s in samples])[mask] - torch.cat(old)[mask]).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
        found.num_clipped += int((clipped * advantage < ratio * advantage).sum())
        found.policy_losses.append(loss.item())
        found.grad_norms.append(descend(actor, optimizer, loss))
    return found


def test_a_step_equals_its_definitions() -> None:
    samples = varied_rollouts()
    expected = reference_step(samples)
    trainer = make_trainer(
        {
            "estimator": "gae",
            "gamma": GAMMA,
            "lam": LAM,
            "bootstrap": "value",
            "clip_low": CLIP,
            "clip_high": CLIP,
            "kl": {"placement": "reward", "beta": BETA},
        },
        {"num_epochs": NUM_EPOCHS, "lr": CRITIC_LR, "value_clip": VALUE_CLIP},
        dtype=F64,
        num_epochs=NUM_EPOCHS,
        lr=LR,
        pack_max_tokens=60,
    )
    metrics = trainer.step(samples).metrics

    for name in ("rewards", "values", "advantages", "returns"):
        actual = [torch.tensor(values, dtype=F64) for values in arrays(trainer, name)]
        for a, e in zip(actual, getattr(expected, name), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6, msg=name)
    assert metrics["kl_reward"] == pytest.approx(expected.kl, rel=1e-6, abs=1e-7)
    assert metrics["loss"] == pytest.approx(np.mean(expected.policy_losses), rel=1e-6)
    assert metrics["critic_loss"] == pytest.approx(np.mean(expected.critic_losses), rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(np.mean(expected.grad_norms), rel=1e-6)
    assert metrics["critic_grad_norm"] == pytest.approx(np.mean(expected.critic_grad_norms), rel=1e-6)

    num_tokens = NUM_EPOCHS * sum(int(sample.loss_mask.sum()) for sample in samples)
    clipped = (metrics["clip_low_fraction"] or 0) + (metrics["clip_high_fraction"] or 0)
    assert (clipped * num_tokens, (metrics["value_clip_fraction"] or 0) * num_tokens) == pytest.approx(
        (expected.num_clipped, expected.num_values_clipped)
    )
    assert expected.num_clipped
    assert expected.num_values_clipped
