"""What a step learns from, and what it leaves as it was."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stenograph.training.batch import sequence
from stenograph.training.measuring import explained_variance_by_turn
from stenograph.training.report import Tally
from stenograph.types import Sample
from support.samples import VOCAB, make_sample
from support.steps import arrays, give_values, make_trainer, numbers, varied_rollouts, weights_of, without_passes

GAE = {"estimator": "gae", "whiten": False}
KL = {"placement": "reward"}
PROCESSED = [sample for sample in varied_rollouts() if sample.turns[0].logprobs_mode == "processed"]


def one_action(rewards: dict[int, float], **settings: Any) -> list[Sample]:
    """A rollout for each prompt token, with one action that earns the reward."""
    return [
        make_sample([("context", [token]), ("output", [99])], rollout=f"r{token}", reward=reward, **settings)
        for token, reward in rewards.items()
    ]


def same_weights(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_clipping_begins_behind_the_first_mini_batch() -> None:
    clipped = []
    for num_epochs in (1, 2):  # both have taken old_logprobs in a pass of their own
        trainer = make_trainer(GAE | {"kl": KL, "clip_low": 0.01, "clip_high": 0.01}, num_epochs=num_epochs)
        metrics = trainer.step(varied_rollouts()).metrics
        clipped.append((metrics["clip_low_fraction"], metrics["clip_high_fraction"]))
        if num_epochs == 1:
            assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert clipped[0] == (0.0, 0.0)
    assert min(clipped[1]) > 0


def test_old_logprobs_and_values_are_those_before_the_first_update() -> None:
    samples = varied_rollouts()
    trainer = make_trainer(GAE, {"num_epochs": 3, "lr": 1e-2}, num_epochs=3, num_minibatches=2, lr=1e-2)
    before = [logprobs.tolist() for logprobs in trainer.old_logprobs(samples)]
    report = trainer.step(samples)
    assert (report.num_updates, report.num_critic_updates) == (6, 3)
    assert arrays(trainer, "old_logprobs") == before
    assert [logprobs.tolist() for logprobs in trainer.old_logprobs(samples)] != before

    untouched = make_trainer(GAE, {"lr": 1e-30}, lr=1e-30)
    untouched.step(samples)
    assert arrays(trainer, "values") == arrays(untouched, "values")
    trainer.step(samples)
    assert arrays(trainer, "values") != arrays(untouched, "values")


@pytest.mark.parametrize(
    ("algorithm", "samples"),
    [
        (GAE, varied_rollouts()),
        (GAE | {"kl": {"placement": "loss"}, "off_policy": {"level": "token"}}, varied_rollouts()),
        (GAE | {"kl": KL}, PROCESSED),
    ],
    ids=["no KL", "KL in the loss", "KL in the reward"],
)
def test_a_warm_up_trains_the_critic_and_never_asks_the_actor(algorithm: dict[str, Any], samples: list[Sample]) -> None:
    trainer = make_trainer(algorithm, {"warmup_steps": 2}, lr_schedule="linear", num_epochs=2)
    assert trainer.critic is not None
    actor, critic, lr = weights_of(trainer.model), weights_of(trainer.critic), trainer.updates["actor"].lr
    with without_passes(trainer.model):
        for _ in range(2):
            report = trainer.step(samples)
            assert (report.is_warmup, report.applied, report.num_updates, report.skipped) == (True, False, 0, ())
            assert report.num_critic_updates == 2
    assert same_weights(trainer.model, actor)
    assert not same_weights(trainer.critic, critic)
    updates = trainer.updates["actor"]
    assert (updates.attempted, updates.lr, len(updates.optimizer.state), trainer.version) == (0, lr, 0, 0)

    report = trainer.step(samples)
    assert (report.is_warmup, report.applied, report.num_updates, trainer.version) == (False, True, 2, 1)
    assert updates.lr < lr


def test_in_a_warm_up_the_divergence_is_that_of_what_was_sampled() -> None:
    trainer = make_trainer(GAE | {"kl": KL}, {"warmup_steps": 1})
    report = trainer.step(PROCESSED)
    ref, masks = arrays(trainer, "ref_logprobs"), [sample.loss_mask for sample in PROCESSED]
    apart = [(s.rollout_logprobs - np.array(r))[m] for s, r, m in zip(PROCESSED, ref, masks, strict=True)]
    assert report.metrics["kl_reward"] == pytest.approx(np.concatenate(apart).mean(), rel=1e-5)


@pytest.mark.parametrize(("threshold", "ends"), [(0.95, True), (0.97, False)])
def test_a_warm_up_ends_where_enough_is_explained(threshold: float, ends: bool) -> None:
    trainer = make_trainer(GAE, {"warmup_steps": 3, "warmup_explained_variance": threshold})
    assert trainer.critic is not None
    values = torch.zeros(VOCAB)
    values[1:3] = torch.tensor([0.1, 0.9])
    give_values(trainer.critic, lambda ids: values[ids])
    reports = [trainer.step(one_action({1: 0.0, 2: 1.0})) for _ in range(4)]
    assert reports[0].metrics["explained_variance"] == pytest.approx(0.96)
    assert [report.is_warmup for report in reports] == [True, not ends, not ends, False]


def test_an_actor_learns_to_the_end_of_a_run_whose_warm_up_was_short() -> None:
    warmup = {"warmup_steps": 4, "warmup_explained_variance": 0.9}
    trainer = make_trainer(GAE, warmup, steps=6, lr=1e-2, lr_schedule="linear")
    assert trainer.critic is not None
    values = torch.zeros(VOCAB)
    values[1:3] = torch.tensor([0.1, 0.9])
    give_values(trainer.critic, lambda ids: values[ids])
    for step in range(6):
        before, rate = weights_of(trainer.model), trainer.updates["actor"].lr
        report = trainer.step(one_action({1: 0.0, 2: 1.0}))
        assert (report.is_warmup, rate > 0) == (step == 0, True)
        assert same_weights(trainer.model, before) == report.is_warmup


def test_a_group_of_equal_rewards_still_trains_beside_a_critic() -> None:
    samples = [dataclasses.replace(sample, reward=0.7) for sample in varied_rollouts()]
    trainer = make_trainer({"estimator": "gae"})
    report = trainer.step(samples)
    assert report.applied
    assert report.num_computed_tokens == report.num_tokens
    assert report.metrics["grad_norm"]


def test_the_reward_is_for_the_branch_that_ended_the_main_conversation() -> None:
    branches = [
        make_sample([("context", [1]), ("output", [2 + n, 9])], branch=n, reward=1.0, rollout="many") for n in range(4)
    ]
    branches[3] = dataclasses.replace(branches[3], role="sub-agent")
    other = make_sample([("context", [1]), ("output", [8, 9])], rollout="other", reward=0.0)
    earned = {}
    for credit in ("every_branch", "main_branch"):
        trainer = make_trainer(GAE | {"credit": credit})
        report = trainer.step([*branches, other])
        assert (report.num_rollouts, report.reward_mean) == (2, 0.5)
        earned[credit] = [rewards[-1] for rewards in arrays(trainer, "rewards")]
    assert earned == {"every_branch": [1, 1, 1, 1, 0], "main_branch": [0, 0, 1, 0, 0]}

    trainer = make_trainer({"estimator": "rloo", "credit": "main_branch"})
    report = trainer.step([*branches, other])
    assert [advantages[-1] for advantages in arrays(trainer, "advantages")] == [0, 0, 1, 0, -1]
    assert (report.num_tokens, report.num_computed_tokens) == (10, 4)


def test_seven_branches_are_one_rollout_in_every_number() -> None:
    many = [make_sample([("context", [1]), ("output", [2 + n])], branch=n, rollout="many") for n in range(7)]
    other = make_sample([("context", [1]), ("output", [50])], rollout="other", reward=0.0)
    trainer = make_trainer(GAE, {"num_minibatches": 5})
    report = trainer.step([*many, dataclasses.replace(other, task_id="easy")])
    assert (report.num_rollouts, report.reward_mean) == (2, 0.5)
    assert report.reward_by_task == {"task": 1.0, "easy": 0.0}
    assert (report.metrics["response_length_mean"], report.metrics["response_length_max"]) == (4.0, 7.0)
    assert report.num_critic_updates == 2 * 2  # epochs, and mini-batches of whole rollouts


def test_beta_is_adapted_to_the_divergence_and_said_as_it_was_used() -> None:
    samples = varied_rollouts()
    for target, factor in ((1e-6, 1 + 0.2 * 6 / 100), (1e6, 1 - 0.2 * 6 / 100)):
        trainer = make_trainer(
            GAE | {"kl": {"placement": "reward", "kind": "k3", "beta": 0.5, "target": target, "horizon": 100}}
        )
        reports = [trainer.step(samples) for _ in range(2)]
        assert [report.metrics["kl_beta"] for report in reports] == pytest.approx([0.5, 0.5 * factor])
        assert trainer.beta == pytest.approx(0.5 * factor**2)


def chained(rewards: list[float], values: list[float], edges: list[tuple[float, float]]) -> list[float]:
    """Advantages, with a discount and a decay for each step from one action to the next."""
    advantages, following, value = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        gamma, lam = edges[t]
        following = rewards[t] + gamma * value - values[t] + gamma * lam * following
        advantages[t], value = following, values[t]
    return advantages


@pytest.mark.parametrize(
    ("settings", "edges", "of_returns"),
    [
        ({"gamma": 0.9, "lam": "length_adaptive", "lam_alpha": 0.5}, [(0.9, 0.5)] * 4, None),
        ({"gamma": 0.9, "lam": 0.5, "critic_lam": 1.0}, [(0.9, 0.5)] * 4, [(0.9, 1.0)] * 4),
        (
            {"gamma": 0.9, "lam": 0.5, "turn_gamma": 0.7, "turn_lam": 0.3},
            [(0.9, 0.5), (0.7, 0.3), (0.9, 0.5), (0.9, 0.5)],
            None,
        ),
        ({"gamma": 0.9, "lam": 0.5, "turn_lam": 0.0}, [(0.9, 0.5), (0.9, 0.0), (0.9, 0.5), (0.9, 0.5)], None),
    ],
    ids=["adapted to the length", "another for the critic", "another between turns", "turns with lambda alone"],
)
def test_gamma_and_lambda_hold_where_they_are_for(
    settings: dict[str, Any], edges: list[tuple[float, float]], of_returns: list[tuple[float, float]] | None
) -> None:
    sample = make_sample([("context", [1]), ("output", [2, 3]), ("context", [4]), ("output", [5, 6])], reward=1.0)
    first, last = sample.turns
    sample = dataclasses.replace(sample, turns=(dataclasses.replace(first, reward=0.25), last))
    trainer = make_trainer(GAE | settings)
    assert trainer.critic is not None
    give_values(trainer.critic, lambda ids: ids / 10)
    trainer.step([sample])

    rewards, values, mask = [0.0, 0.25, 0.0, 1.0], [0.1, 0.2, 0.4, 0.5], sample.loss_mask
    assert np.array(arrays(trainer, "advantages")[0])[mask] == pytest.approx(chained(rewards, values, edges))
    expected = np.array(chained(rewards, values, of_returns or edges)) + values
    assert np.array(arrays(trainer, "returns")[0])[mask] == pytest.approx(expected)


def test_explained_variance_is_told_turn_by_turn() -> None:
    # first turns: values .1 and .9 of returns 0 and 1; second turns: one constant
    samples = [
        make_sample([("context", [10 * n]), ("output", [99]), ("context", [5]), ("output", [98])], rollout=f"r{n}")
        for n in (1, 2)
    ]
    samples = [
        dataclasses.replace(s, reward=float(n), turns=(dataclasses.replace(s.turns[0], reward=float(n)), s.turns[1]))
        for n, s in enumerate(samples)
    ]
    values = torch.zeros(VOCAB)
    values[torch.tensor([10, 20])] = torch.tensor([0.1, 0.9])
    trainer = make_trainer(GAE | {"gamma": 0.0})
    assert trainer.critic is not None
    give_values(trainer.critic, lambda ids: values[ids])
    report = trainer.step(samples)
    assert report.explained_variance_by_turn == pytest.approx([0.96, 0.0])


def test_turns_of_samples_of_any_shape_are_told_apart() -> None:
    rng, sequences = np.random.default_rng(0), []
    for n in range(3):
        pieces = [(kind, [1] * rng.integers(1, 5)) for _ in range(9 - n) for kind in ("context", "output")]
        arrays = sequence(make_sample(pieces, rollout=f"r{n}"))
        arrays["loss_mask"][arrays["turn"] == 4] = False  # one that nothing is trained of
        arrays |= {name: rng.normal(size=len(arrays["ids"])).astype(np.float32) for name in ("values", "returns")}
        sequences.append(arrays)
    of_all = {name: np.concatenate([arrays[name] for arrays in sequences]) for name in sequences[0]}
    expected = []
    for n in range(9):
        chosen = of_all["loss_mask"] & (of_all["turn"] == n)
        returns, errors = of_all["returns"][chosen], (of_all["returns"] - of_all["values"])[chosen]
        expected.append(pytest.approx(1 - errors.var() / returns.var(), rel=1e-5) if n != 4 else None)
    assert explained_variance_by_turn(sequences) == expected


def test_policies_that_are_far_apart_still_have_a_finite_distance() -> None:
    samples = [dataclasses.replace(s, rollout_logprobs=s.rollout_logprobs - 1e3) for s in varied_rollouts()]
    metrics = make_trainer(GAE).step(samples).metrics
    assert 1e8 < (metrics["rollout_kl_k3"] or 0) < math.inf


def test_every_number_of_a_step_is_explained_and_nothing_else() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text().partition("## Metrics")[2]
    named: list[str] = []
    for row in page.splitlines():
        for name in re.findall(r"`(\w+)`", row.split("|")[1]) if row.startswith("| `") else ():
            named.append(named[-1].rpartition("_")[0] + name if name.startswith("_") else name)
    assert len(named) == len(set(named))
    assert set(named) == make_trainer(GAE).step([]).row().keys() | {"training_seconds"}


def test_a_sum_that_no_metric_is_made_of_is_refused() -> None:
    with pytest.raises(ValueError, match="critic/surprise"):
        Tally().add("critic", {"surprise": torch.zeros(())})


def test_a_step_goes_on_from_a_state_as_if_nothing_had_been_between() -> None:
    algorithm = {"estimator": "gae", "kl": KL | {"target": 0.01}}
    settings: dict[str, Any] = {"num_minibatches": 2}
    whole = make_trainer(algorithm, {"warmup_steps": 1}, **settings)
    reports = [whole.step(varied_rollouts(seed)) for seed in range(3)]

    before, after = (make_trainer(algorithm, {"warmup_steps": 1}, **settings) for _ in range(2))
    for seed in range(2):
        before.step(varied_rollouts(seed))
    assert before.critic is not None
    assert after.critic is not None
    after.model.load_state_dict(before.model.state_dict())
    after.critic.load_state_dict(before.critic.state_dict())
    for name, updates in after.updates.items():
        updates.load_optimizer(before.updates[name].optimizer_state())
        updates.load_schedule(before.updates[name].schedule_state())
    after.load_state(before.state())
    assert numbers(after.step(varied_rollouts(2))) == numbers(reports[2])
    assert same_weights(after.model, weights_of(whole.model))


def test_a_fixed_beta_is_what_the_configuration_says_now() -> None:
    before, after = (make_trainer(GAE | {"kl": KL | {"beta": beta}}) for beta in (0.5, 0.25))
    after.load_state(before.state())
    assert after.beta == 0.25


def test_what_a_state_lacks_is_said_and_kept() -> None:
    trainer = make_trainer({"estimator": "gae"})
    trainer.beta = 0.125
    with pytest.warns(UserWarning, match="nothing of beta"):
        trainer.load_state({"num_steps": 3, "version": 2, "is_critic_warm": True})
    assert trainer.state() == {"num_steps": 3, "version": 2, "beta": 0.125, "is_critic_warm": True}
