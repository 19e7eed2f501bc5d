"""What trainers of language models get wrong, each shown by whole steps.

What of it shows in the pure functions has its tests in tests/unit/algorithms, test_packing.py and test_updates.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from stenograph.config import AlgorithmConfig
from stenograph.types import Sample
from support.models import fresh_logprobs
from support.samples import make_sample
from support.steps import actor_and_reference, arrays, give_values, make_trainer, numbers, varied_rollouts, weights_of

GAE = {"estimator": "gae", "whiten": False}
# What each token's state is worth: 9 where an observation comes next, or nothing does.
PIECES = [("context", [1, 2]), ("output", [3, 4]), ("context", [5, 6]), ("output", [7, 8]), ("context", [9, 10])]
VALUES = {2: 0.1, 3: 0.2, 6: 0.3, 7: 0.4}


def table(values: Mapping[int, float], elsewhere: float) -> torch.Tensor:
    """[vocabulary], to be indexed by ids."""
    return torch.tensor([values.get(i, elsewhere) for i in range(307)])


def at_engine(sample: Sample, logprobs: Any) -> Sample:
    """`sample`, with these as the engine's log-probabilities of its trainable tokens."""
    values = np.zeros(len(sample.ids), np.float32)
    values[sample.loss_mask] = logprobs
    return dataclasses.replace(sample, rollout_logprobs=values)


@pytest.mark.parametrize("noise", [9.0, math.nan])
def test_observations_do_not_exist_for_the_chain(noise: float) -> None:
    trainer = make_trainer(GAE | {"gamma": 0.97, "lam": 0.95})
    assert trainer.critic is not None
    values = table(VALUES, noise)
    give_values(trainer.critic, lambda ids: values[ids])
    report = trainer.step([make_sample(PIECES, reward=1.0)])

    v, rewards, advantage, expected = [*VALUES.values(), 0.0], [0.0, 0.0, 0.0, 1.0], 0.0, []
    for t in reversed(range(4)):
        advantage = rewards[t] + 0.97 * v[t + 1] - v[t] + 0.97 * 0.95 * advantage
        expected.insert(0, advantage)
    (advantages,), (returns,) = arrays(trainer, "advantages"), arrays(trainer, "returns")
    is_action = make_sample(PIECES).loss_mask
    assert np.array(advantages)[is_action] == pytest.approx(expected)
    assert np.array(returns)[is_action] == pytest.approx(np.array(expected) + v[:4])
    assert not np.array(advantages)[~is_action].any()
    assert report.metrics["value_mean"] == pytest.approx(0.25)
    assert report.applied
    assert math.isfinite(report.metrics["critic_loss"] or math.nan)


def test_the_last_action_earns_the_reward_whatever_was_said_after_it() -> None:
    trainer = make_trainer(GAE | {"lam": 1.0})
    sample = make_sample(PIECES, reward=0.5)
    masked = sample.loss_mask.copy()
    masked[7] = False  # the last action, which is not trained
    trainer.step([sample, dataclasses.replace(sample, loss_mask=masked, rollout_id="other")])
    assert arrays(trainer, "rewards") == [[0, 0, 0, 0, 0, 0, 0, 0.5, 0, 0]] * 2
    # what is to come is carried over observations
    assert np.array(arrays(trainer, "returns")) == pytest.approx(np.array([[0, 0, 0.5, 0.5, 0, 0, 0.5, 0.5, 0, 0]] * 2))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_masked_is_never_read(poison: float) -> None:
    outcomes = []
    for masked in (-1.0, poison):
        samples = [
            dataclasses.replace(s, rollout_logprobs=np.nan_to_num(s.rollout_logprobs, nan=masked))
            for s in varied_rollouts()
        ]
        trainer = make_trainer(
            GAE
            | {
                "off_policy": {"level": "sequence", "bound": "mask", "veto": 0.1},
                "kl": {"placement": "reward", "behaviour": "engine"},
            },
            num_epochs=2,
        )
        outcomes.append((numbers(trainer.step(samples)), arrays(trainer, "returns"), weights_of(trainer.model)))
    assert outcomes[0][:2] == outcomes[1][:2]
    assert all(math.isfinite(value) for value in outcomes[0][0].values())
    assert all(torch.equal(tensor, outcomes[1][2][name]) for name, tensor in outcomes[0][2].items())


def test_advantages_are_whitened_over_all_trainable_tokens_of_the_step() -> None:
    found = {}
    for whiten in (True, False):
        trainer = make_trainer({"estimator": "gae", "whiten": whiten}, pack_max_tokens=1)
        trainer.step(varied_rollouts())
        found[whiten] = np.concatenate(arrays(trainer, "advantages"))
    mask = np.concatenate([sample.loss_mask for sample in varied_rollouts()])
    raw = found[False][mask].astype(np.float64)
    assert found[True][mask] == pytest.approx((raw - raw.mean()) / raw.std(ddof=1), rel=1e-5, abs=1e-6)
    assert not found[True][~mask].any()


def test_a_single_trainable_token_is_whitened_to_0_and_not_divided() -> None:
    trainer = make_trainer({"estimator": "gae"})
    report = trainer.step([make_sample([("context", [1]), ("output", [2])])])
    assert arrays(trainer, "advantages") == [[0.0, 0.0]]
    assert (report.metrics["loss"], report.metrics["grad_norm"]) == (0.0, 0.0)
    assert report.num_critic_updates == 2


@pytest.mark.parametrize(
    "estimator", ["grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline"]
)
def test_equal_rewards_and_single_rollouts_give_exactly_0(estimator: str) -> None:
    samples = [
        make_sample([("context", [1]), ("output", list(range(2, 4 + n)))], rollout=f"r{n}", reward=0.7)
        for n in range(7)
    ]
    alone = make_sample([("context", [1]), ("output", [2])], rollout="alone", group=None, reward=0.7)
    trainer = make_trainer({"estimator": estimator, "k": 2 if estimator == "pass_at_k" else None})
    report = trainer.step([*samples, alone])
    assert not np.concatenate(arrays(trainer, "advantages")).any()
    assert report.skipped == ("every gradient is 0",)


def stale() -> list[Sample]:
    """One token of advantage 1/2, and four of -1/2, two of which an older policy sampled."""
    short = make_sample([("context", [1]), ("output", [2])], rollout="short", reward=1.0, version=1)
    long = make_sample([("context", [1]), ("output", [3, 4, 5, 6])], rollout="long", reward=0.0, version=1)
    versions = long.versions.copy()
    versions[1:3] = 0
    samples = [short, dataclasses.replace(long, versions=versions)]
    old = make_trainer({}).old_logprobs(samples)
    return [dataclasses.replace(s, rollout_logprobs=logprobs) for s, logprobs in zip(samples, old, strict=True)]


@pytest.mark.parametrize(
    ("reduction", "whole", "counted", "not_counted"),
    [
        ({"reduction": "token_mean"}, 1.5 / 5, 0.5 / 5, 0.5 / 3),
        ({"reduction": "sequence_mean"}, (0.5 - 0.5) / 2, (0.25 - 0.5) / 2, (0.5 - 0.5) / 2),
        ({"reduction": "constant_length", "length": 10}, 1.5 / 20, 0.5 / 20, 0.5 / 20),
    ],
    ids=lambda value: value["reduction"] if isinstance(value, dict) else "",
)
def test_every_mean_is_over_the_whole_batch_and_says_over_what(
    reduction: dict[str, Any], whole: float, counted: float, not_counted: float
) -> None:
    rejecting = {"level": "token", "max_staleness": 0}
    losses = []
    for off_policy in ({}, rejecting, rejecting | {"count_rejected": False}):
        trainer = make_trainer({"estimator": "dr_grpo", "off_policy": off_policy, **reduction}, pack_max_tokens=1)
        trainer.version = 1
        report = trainer.step(stale())
        assert report.row()["loss_denominator"] == reduction["reduction"]
        losses.append(report.metrics["loss"])
    assert losses == pytest.approx([whole, counted, not_counted], abs=1e-6)


def test_rejection_leaves_advantages_and_returns_alone() -> None:
    found = []
    for max_staleness in (1, 0):
        trainer = make_trainer({"estimator": "gae", "off_policy": {"level": "token", "max_staleness": max_staleness}})
        trainer.version = 1
        report = trainer.step(stale())
        found.append((report.metrics["rejected_fraction"], arrays(trainer, "advantages"), arrays(trainer, "returns")))
    assert [rejected for rejected, *_ in found] == [0.0, 0.4]
    assert found[0][1:] == found[1][1:]


def test_tokens_that_cannot_move_the_actor_are_rejected_like_others() -> None:
    learn = stale()
    equal = [dataclasses.replace(s, rollout_id=f"equal {s.rollout_id}", group_id="equal", reward=0.7) for s in learn]
    reports = []
    for samples in (learn, [*learn, *equal], equal):
        trainer = make_trainer({"off_policy": {"level": "token", "max_staleness": 0, "count_rejected": False}})
        trainer.version = 1
        reports.append(trainer.step(samples))
        assert reports[-1].metrics["rejected_fraction"] == pytest.approx(0.4)
        assert reports[-1].metrics["importance_weight_max"] == pytest.approx(1.0, rel=1e-5)
    # as many tokens again in the denominator, and nothing more in what it divides
    assert reports[1].metrics["loss"] == pytest.approx((reports[0].metrics["loss"] or math.nan) / 2, rel=1e-5)


@pytest.mark.parametrize("algorithm", [{"estimator": "gae"}, {}], ids=["gae", "grpo"])
def test_a_step_whose_tokens_are_all_rejected_leaves_the_actor_as_it_was(algorithm: dict[str, Any]) -> None:
    algorithm = algorithm | {"off_policy": {"level": "token", "max_staleness": 9}}
    trainer = make_trainer(algorithm, weight_decay=0.1)
    assert trainer.step(varied_rollouts()).applied  # moments that would move the weights further
    before, trainer.version = weights_of(trainer.model), 20
    report = trainer.step(varied_rollouts())
    assert report.metrics["rejected_fraction"] == 1.0
    assert (report.applied, report.skipped, report.metrics["grad_norm"]) == (False, ("every gradient is 0",), None)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(trainer.model).items())
    assert report.num_critic_updates == (2 if trainer.critic is not None else 0)  # what was earned is known

    pulled = make_trainer(algorithm | {"kl": {"placement": "loss"}})
    pulled.version = 20
    assert pulled.step(varied_rollouts()).applied  # by what no ratio weighs


def two_temperatures(mode: Any = "processed") -> Sample:
    sample = make_sample([("context", [1, 2]), ("output", [3, 4]), ("context", [5]), ("output", [6, 7])])
    cold, hot = (
        dataclasses.replace(turn, temperature=t, logprobs_mode=mode)
        for turn, t in zip(sample.turns, (0.5, 2.0), strict=True)
    )
    return dataclasses.replace(sample, turns=(cold, hot))


def test_logprobs_and_entropy_are_at_the_temperature_of_each_token() -> None:
    sample, (model, _) = two_temperatures(), actor_and_reference()
    trainer = make_trainer({"estimator": "gae"})
    expected = np.zeros(7, np.float32)
    entropies = []
    for turn in sample.turns:
        expected[turn.start : turn.end] = fresh_logprobs(
            model, sample.ids[: turn.start], sample.ids[turn.start : turn.end], turn.temperature
        )
        with torch.no_grad():
            logits = model(torch.from_numpy(sample.ids).long()[None]).logits[0, turn.start - 1 : turn.end - 1]
        entropies += torch.distributions.Categorical(logits=logits / turn.temperature).entropy().tolist()
    assert trainer.old_logprobs([sample])[0] == pytest.approx(expected, rel=1e-5)
    report = trainer.step([sample])
    assert arrays(trainer, "old_logprobs")[0] == pytest.approx(expected, rel=1e-5)
    assert report.metrics["entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)


def test_raw_logprobs_at_another_temperature_are_in_no_ratio_and_no_metric() -> None:
    algorithm = GAE | {"off_policy": {"level": "token"}, "kl": {"placement": "reward", "behaviour": "engine"}}
    rows, kl = [], []
    for logprobs in (-1.0, -7.0):
        trainer = make_trainer(algorithm)
        report = trainer.step([at_engine(two_temperatures("raw"), logprobs)])
        assert report.metrics["importance_weight_max"] == 1.0
        assert report.metrics["logprob_difference_mean"] is report.metrics["rollout_kl_k3"] is None
        rows.append(numbers(report))
        # the divergence is that of the actor's own, computed anew
        old, ref = np.array(arrays(trainer, "old_logprobs")), np.array(arrays(trainer, "ref_logprobs"))
        assert report.metrics["kl_reward"] == pytest.approx((old - ref).sum() / 4)
        kl.append(report.metrics["kl_reward"])
    assert rows[0] == rows[1]
    # those of the very distribution are read
    trainer = make_trainer(algorithm)
    report = trainer.step([at_engine(two_temperatures(), -1.0)])
    assert report.metrics["kl_reward"] == pytest.approx(-1.0 - np.array(arrays(trainer, "ref_logprobs")).sum() / 4)
    assert report.metrics["importance_weight_max"] != 1.0


def test_a_veto_rejects_the_tokens_whose_ratio_is_not_known_too() -> None:
    sample = two_temperatures("raw")
    processed = dataclasses.replace(sample.turns[0], temperature=1.0, logprobs_mode="processed")
    sample = at_engine(dataclasses.replace(sample, turns=(processed, sample.turns[1])), [-30.0, 0.0, -1.0, -1.0])
    for veto, expected in ((1e-9, None), (0.5, [0.0] * 4)):
        trainer = make_trainer(GAE | {"off_policy": {"level": "token", "veto": veto}})
        report = trainer.step([sample])
        weights = np.array(arrays(trainer, "weights"))[0][sample.loss_mask]
        assert weights.tolist() == (expected or [2.0, weights[1], 1.0, 1.0])
        assert report.metrics["vetoed_fraction"] == (1.0 if expected else 0.0)


@pytest.mark.parametrize("output", [[5], [5, 6, 7, 8]], ids=["one token", "all but the first"])
def test_a_response_is_predicted_by_what_is_before_it(output: list[int]) -> None:
    trainer = make_trainer(GAE | {"lam": 1.0})
    assert trainer.critic is not None
    values = torch.arange(307) / 10
    give_values(trainer.critic, lambda ids: values[ids])
    report = trainer.step([make_sample([("context", [4]), ("output", output)], reward=2.0)])
    before = np.array([4, *output[:-1]]) / 10
    assert arrays(trainer, "values")[0][1:] == pytest.approx(before)
    assert arrays(trainer, "advantages")[0][1:] == pytest.approx(2.0 - before)
    assert report.applied


def test_kl_in_the_reward_moves_the_first_target_by_all_that_follows() -> None:
    sample = make_sample([("context", [1]), ("output", [2, 3, 4, 5])], reward=1.0)
    algorithm = GAE | {"lam": 1.0, "kl": {"placement": "reward", "beta": 0.2, "behaviour": "engine"}}
    trainer = make_trainer(algorithm)
    trainer.step([sample])
    reference = np.array(arrays(trainer, "ref_logprobs")[0])[1:]

    trainer = make_trainer(algorithm)
    report = trainer.step([at_engine(sample, reference + 0.5)])
    assert arrays(trainer, "rewards")[0][1:] == pytest.approx([-0.1, -0.1, -0.1, 0.9], abs=1e-6)
    assert arrays(trainer, "returns")[0][1:] == pytest.approx([1 - 0.4, 1 - 0.3, 1 - 0.2, 1 - 0.1], abs=1e-6)
    assert report.metrics["kl_reward"] == pytest.approx(0.5, abs=1e-6)  # not what became of it
    assert report.reward_mean == 1.0


def test_kl_in_the_loss_pulls_towards_the_reference() -> None:
    samples = [dataclasses.replace(s, reward=0.7) for s in varied_rollouts()]  # nothing else moves the actor
    for kind in ("k2", "k3", "abs"):
        trainer = make_trainer({"kl": {"placement": "loss", "kind": kind, "beta": 1.0}}, lr=1e-4)
        first = trainer.step(samples)
        assert first.metrics["grad_norm"]
        assert (trainer.step(samples).metrics["kl_loss"] or math.inf) < (first.metrics["kl_loss"] or 0)


def test_k1_in_the_loss_is_refused() -> None:
    with pytest.raises(ValidationError, match='use "k2"'):
        AlgorithmConfig(kl={"placement": "loss", "kind": "k1"})  # pyright: ignore[reportArgumentType]


def test_explained_variance_is_that_of_all_packs_together() -> None:
    trainer = make_trainer(GAE, pack_max_tokens=1)
    assert trainer.critic is not None
    values = table({1: 0.1, 2: 0.9}, 0.0)
    give_values(trainer.critic, lambda ids: values[ids])
    samples = [make_sample([("context", [n + 1]), ("output", [3])], rollout=f"r{n}", reward=float(n)) for n in range(2)]
    assert trainer.step(samples).metrics["explained_variance"] == pytest.approx(0.96)


@pytest.mark.parametrize("broken", ["actor", "critic"])
def test_an_update_that_is_skipped_leaves_that_model_as_it_was(broken: str) -> None:
    schedule = {"lr_schedule": "linear", "max_grad_norm_skip": 1e-9}
    trainer = make_trainer(
        {"estimator": "gae"},
        {"lr": 1e-3, "num_epochs": 1} | (schedule if broken == "critic" else {}),
        **schedule if broken == "actor" else {},
    )
    assert trainer.critic is not None
    models = {"actor": trainer.model, "critic": trainer.critic}
    before, lr = weights_of(models[broken]), trainer.updates[broken].lr
    report = trainer.step(varied_rollouts())

    prefix = "critic: " if broken == "critic" else ""
    assert report.skipped == (f"{prefix}gradient norm over max_grad_norm_skip",)
    assert (report.num_updates, report.num_critic_updates) == ((0, 1) if broken == "actor" else (1, 0))
    assert trainer.version == int(report.applied) == report.num_updates
    updates = trainer.updates[broken]
    assert (updates.applied, updates.attempted, updates.lr) == (0, 1, lr)
    assert not updates.optimizer.state
    assert all(torch.equal(tensor, before[name]) for name, tensor in models[broken].state_dict().items())
    assert trainer.num_steps == 1


def test_a_gradient_that_is_not_finite_is_of_its_model_alone() -> None:
    trainer = make_trainer({"estimator": "gae"}, {"num_epochs": 1})
    with torch.no_grad():
        trainer.model.get_parameter("model.norm.weight")[0] = math.inf
    report = trainer.step(varied_rollouts())
    assert report.skipped == ("gradient is not finite",)
    assert (report.num_critic_updates, trainer.version, trainer.updates["actor"].applied) == (1, 0, 0)


def test_a_skipped_mini_batch_leaves_nothing_in_the_next() -> None:
    samples = [s for s in varied_rollouts() if s.rollout_id in ("0-0", "0-2")]
    empty = dataclasses.replace(
        samples[0], rollout_id="empty", group_id="empty", loss_mask=np.zeros(len(samples[0].ids), bool)
    )
    trainer = make_trainer({"estimator": "gae"}, {"num_minibatches": 3, "num_epochs": 1}, num_minibatches=3)
    report = trainer.step([*samples, empty])
    assert report.skipped == ("critic: no trainable tokens", "no trainable tokens")
    assert (report.num_updates, report.num_critic_updates) == (2, 2)
    assert all(math.isfinite(value) for value in numbers(report).values())


@pytest.mark.parametrize("num_rollouts", [0, 2])
def test_nothing_trainable_is_said_and_not_divided_by(num_rollouts: int) -> None:
    samples = [dataclasses.replace(s, loss_mask=np.zeros(len(s.ids), bool)) for s in varied_rollouts()[:num_rollouts]]
    algorithm = {"estimator": "gae", "kl": {"placement": "reward"}, "off_policy": {"level": "sequence"}}
    trainer = make_trainer(algorithm, {"num_epochs": 1})
    before = weights_of(trainer.model)
    report = trainer.step(samples)
    assert report.skipped == ("critic: no trainable tokens", "no trainable tokens")
    assert (report.applied, report.num_tokens, trainer.version) == (False, 0, 0)
    assert all(math.isfinite(value) for value in numbers(report).values())
    assert report.metrics["loss"] is report.metrics["critic_loss"] is report.metrics["explained_variance"] is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())
