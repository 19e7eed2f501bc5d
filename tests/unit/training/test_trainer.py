from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stenograph.algorithms.advantages import group_advantages
from stenograph.config import AlgorithmConfig, Config, TrainingConfig
from stenograph.errors import CheckpointError, ConfigError
from stenograph.training.trainer import StepReport, Trainer
from stenograph.types import Sample
from support.models import tiny_model
from support.samples import VOCAB, make_sample, random_groups
from support.steps import make_trainer


def trainer(seed: int = 0, *, dtype: torch.dtype = torch.float32, estimator: Any = "grpo", **training: Any) -> Trainer:
    return training_by(AlgorithmConfig(estimator=estimator), seed, dtype=dtype, **training)


def training_by(
    algorithm: AlgorithmConfig, seed: int = 0, *, dtype: torch.dtype = torch.float32, **training: Any
) -> Trainer:
    values = {"lr": 1e-3, "device": "cpu", **training}
    config = Config(training=TrainingConfig(**values), algorithm=algorithm)
    return Trainer(tiny_model(seed=seed, dtype=dtype), config)


def weights_of(t: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in t.weights.tensors()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def numbers(report: StepReport) -> dict[str, float]:
    return {
        name: value
        for name, value in report.row().items()
        if isinstance(value, int | float) and name not in ("seconds", "num_forward_tokens")
    }


def reference_step(samples: list[Sample]) -> tuple[float, float]:
    """Loss and gradient norm of one on-policy step: float64, sample by sample, as the definitions read."""
    model = tiny_model(dtype=torch.float64)
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    advantages = group_advantages(rewards, [str(s.group_id) for s in samples], kind="grpo")
    num_tokens = sum(int(s.loss_mask.sum()) for s in samples)
    loss = torch.zeros((), dtype=torch.float64)
    for sample, advantage in zip(samples, advantages, strict=True):
        ids = torch.from_numpy(sample.ids).long()
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
        for i in np.flatnonzero(sample.loss_mask):
            chosen = logprobs[i - 1, ids[i]]
            loss = loss - advantage * (chosen - chosen.detach()).exp() / num_tokens
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.stack([g.square().sum() for g in gradients]).sum().sqrt().item()


def test_loss_and_gradient_equal_the_reference() -> None:
    samples = random_groups()
    loss, grad_norm = reference_step(samples)
    report = trainer().step(samples)
    assert report.metrics["loss"] == pytest.approx(loss, abs=1e-7)
    assert report.metrics["grad_norm"] == pytest.approx(grad_norm, rel=1e-6)
    assert (report.num_rollouts, report.num_tokens, report.num_computed_tokens) == (6, 54, 54)


def test_two_runs_are_bit_identical_and_leave_global_generators_alone() -> None:
    before = torch.random.get_rng_state(), str(np.random.get_state())
    results = []
    for _ in range(2):
        t = trainer(num_epochs=2, num_minibatches=2, pack_max_tokens=60)
        reports = [numbers(t.step(random_groups(seed))) for seed in (1, 2)]
        results.append((reports, weights_of(t)))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])
    assert not same(results[0][1], weights_of(trainer()))
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == str(np.random.get_state())


def test_the_first_pass_is_exactly_on_policy() -> None:
    report = trainer().step(random_groups())
    assert (report.metrics["ratio_mean"], report.metrics["ratio_max"]) == (1.0, 1.0)
    assert (report.metrics["clip_low_fraction"], report.metrics["clip_high_fraction"], report.metrics["kl_k3"]) == (
        0.0,
        0.0,
        0.0,
    )
    # a separate pass gives the same numbers, since nothing is random
    report = trainer(num_epochs=2, lr=1e-12).step(random_groups())
    assert report.metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert report.metrics["kl_k3"] == pytest.approx(0.0, abs=1e-9)


def test_later_passes_move_away_from_the_frozen_policy() -> None:
    report = trainer(num_epochs=4, lr=3e-2).step(random_groups())
    assert report.num_updates == 4
    assert report.metrics["ratio_max"] is not None
    assert report.metrics["ratio_max"] > 1.2
    assert report.metrics["clip_high_fraction"] is not None
    assert report.metrics["clip_high_fraction"] > 0


@pytest.mark.parametrize(
    "algorithm",
    [
        *({"estimator": kind} for kind in ("grpo", "dr_grpo", "rloo", "opo", "reinforce_pp", "reinforce_pp_baseline")),
        {"estimator": "pass_at_k", "k": 1},
        {"policy_loss": "ppo_clip", "clip_dual": 3.0},
        {"policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
        {"policy_loss": "cispo"},
    ],
    ids=str,
)
def test_a_step_raises_what_was_rewarded(algorithm: dict[str, Any]) -> None:
    samples = [
        make_sample([("context", [1, 2]), ("output", [n, n + 1])], rollout=f"r{n}", reward=reward)
        for n, reward in ((10, 1.0), (20, 0.0))
    ]
    t = training_by(AlgorithmConfig(**algorithm))
    before = [values.sum() for values in t.old_logprobs(samples)]
    report = t.step(samples)
    after = [values.sum() for values in t.old_logprobs(samples)]
    assert report.applied
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_an_optimal_baseline_weighs_rollouts_by_what_they_sampled() -> None:
    long = make_sample([("context", [1, 2]), ("output", [10, 11, 12])], rollout="long", reward=1.0)
    short = make_sample([("context", [1, 2]), ("output", [20])], rollout="short", reward=0.0)
    t = trainer(estimator="opo")
    t.step([long, short])
    assert [arrays["advantages"].max() + arrays["advantages"].min() for arrays in t.last_batch] == [0.25, -0.75]


def test_a_rollout_counts_once_however_it_branched() -> None:
    def branches(n: int) -> list[Sample]:
        return [
            make_sample([("context", [1, 2]), ("output", [3 + b])], rollout="many", reward=1.0, branch=b)
            for b in range(n)
        ]

    others = [make_sample([("context", [1, 2]), ("output", [50 + n])], rollout=f"o{n}", reward=0.0) for n in range(3)]
    for n in (1, 7):
        t = trainer(estimator="rloo")
        report = t.step([*branches(n), *others])
        assert (report.num_rollouts, report.reward_mean) == (4, 0.25)
        # loss at ratio 1 is -sum(advantages) / tokens: n tokens of 1, three of -1/3
        assert report.metrics["loss"] == pytest.approx(-(n - 1) / (n + 3), abs=1e-6)


def test_groups_of_equal_rewards_are_counted_and_not_computed() -> None:
    learn, equal = random_groups(), random_groups(5, num_groups=1)
    equal = [dataclasses.replace(s, group_id="equal", rollout_id=f"e{n}", reward=0.7) for n, s in enumerate(equal)]
    alone, both = trainer().step(learn), trainer().step([*learn, *equal])
    assert (both.num_tokens, both.num_computed_tokens) == (81, 54)
    assert both.num_forward_tokens == alone.num_forward_tokens
    assert both.metrics["grad_norm"] is not None
    assert alone.metrics["grad_norm"] == pytest.approx(both.metrics["grad_norm"] * 81 / 54, rel=1e-5)
    assert both.metrics["logprob_difference_mean"] == alone.metrics["logprob_difference_mean"]


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([dataclasses.replace(s, reward=0.5) for s in random_groups()], "every gradient is 0"),
        (
            [dataclasses.replace(s, loss_mask=np.zeros(len(s.ids), bool)) for s in random_groups()],
            "no trainable tokens",
        ),
        ([], "no trainable tokens"),
    ],
)
def test_nothing_to_learn_skips_the_step(samples: list[Sample], reason: str) -> None:
    t = trainer(weight_decay=0.1)
    t.step(random_groups())  # moments that would move the weights further
    before = weights_of(t)
    report = t.step(samples)
    assert (report.applied, report.skipped, report.num_updates) == (False, (reason,), 0)
    assert (
        report.metrics["loss"],
        report.metrics["grad_norm"],
        report.metrics["ratio_max"],
        report.metrics["logprob_difference_p99"],
    ) == (None,) * 4
    assert same(before, weights_of(t))


def test_a_gradient_that_is_not_finite_skips_the_step() -> None:
    t = trainer()
    t.step(random_groups())
    moments = [state["exp_avg"].clone() for state in t.updates["actor"].optimizer.state.values()]
    with torch.no_grad():
        t.model.get_parameter("model.norm.weight")[0] = math.inf
    before = weights_of(t)
    report = t.step(random_groups())
    assert (report.applied, report.skipped) == (False, ("gradient is not finite",))
    assert report.metrics["grad_norm"] is not None
    assert not math.isfinite(report.metrics["grad_norm"])
    assert same(before, weights_of(t))
    for moment, state in zip(moments, t.updates["actor"].optimizer.state.values(), strict=True):
        assert torch.equal(moment, state["exp_avg"])
    assert all(p.grad is None for p in t.model.parameters())


def test_old_logprobs_are_the_trainers_own() -> None:
    samples = random_groups()
    t = trainer()
    old = t.old_logprobs(samples)
    for sample, values in zip(samples, old, strict=True):
        assert values.dtype == np.float32
        assert (values[~sample.loss_mask] == 0).all()
        assert (values[sample.loss_mask] < 0).all()
    report = t.step(samples)
    difference = np.concatenate(
        [abs(s.rollout_logprobs - o)[s.loss_mask] for s, o in zip(samples, old, strict=True)]
    ).astype(np.float64)
    assert report.metrics["logprob_difference_mean"] == pytest.approx(difference.mean(), rel=1e-5)
    assert report.metrics["logprob_difference_p99"] == pytest.approx(np.quantile(difference, 0.99), rel=1e-5)


def test_shuffled_rewards_keep_their_mean_and_change_the_step() -> None:
    samples = random_groups()
    plain, control, again = trainer(), trainer(shuffle_rewards=True), trainer(shuffle_rewards=True)
    reports = [t.step(samples) for t in (plain, control, again)]
    assert reports[0].reward_mean == reports[1].reward_mean
    assert not same(weights_of(plain), weights_of(control))
    assert same(weights_of(control), weights_of(again))


def test_shuffled_rewards_leave_none_to_the_turns_that_earned_them() -> None:
    sample = make_sample([("context", [1]), ("output", [2, 3]), ("context", [4]), ("output", [5])], reward=0.0)
    turns = tuple(dataclasses.replace(turn, reward=n + 1.0) for n, turn in enumerate(sample.turns))
    earned = []
    for shuffle in (False, True):
        t = make_trainer({"estimator": "gae"}, shuffle_rewards=shuffle)
        t.step([dataclasses.replace(sample, turns=turns)])
        earned.append(t.last_batch[0]["rewards"].tolist())
    assert earned == [[0, 0, 1, 0, 2], [0] * 5]


def test_autocast_computes_in_bfloat16_and_keeps_the_weights() -> None:
    samples = random_groups()
    full, half = trainer(), trainer(autocast="bfloat16")
    a, b = full.step(samples), half.step(samples)
    assert b.metrics["grad_norm"] == pytest.approx(a.metrics["grad_norm"], rel=0.1)
    assert b.metrics["grad_norm"] != a.metrics["grad_norm"]
    assert {tensor.dtype for _, tensor in half.weights.tensors()} == {torch.float32}


def test_samples_that_contradict_each_other_are_refused() -> None:
    pieces = [("context", [1]), ("output", [2])]
    with pytest.raises(ValueError, match="no reward"):
        trainer().step([make_sample(pieces, reward=None)])
    with pytest.raises(ValueError, match="disagree"):
        trainer().step([make_sample(pieces, reward=0.0), make_sample(pieces, reward=1.0, branch=1)])


@pytest.mark.parametrize("algorithm", [{"estimator": "gae"}, {}], ids=["gae", "grpo"])
def test_a_reward_that_is_no_number_is_refused(algorithm: dict[str, Any]) -> None:
    sample = make_sample([("context", [1]), ("output", [2])])
    (turn,) = sample.turns
    broken = (
        dataclasses.replace(sample, reward=math.nan),
        dataclasses.replace(sample, turns=(dataclasses.replace(turn, reward=math.inf),)),
    )
    for one in broken:
        with pytest.raises(ValueError, match="rollout r has a reward that is not finite; judge it anew"):
            make_trainer(algorithm).step([one, make_sample([("context", [1]), ("output", [3])], rollout="other")])


@pytest.mark.parametrize("name", ["nowhere", "cuda:99"])
def test_a_device_that_cannot_be_used_is_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^training\.device: '{name}' cannot be used .+; leave it out") as refused:
        trainer(device=name)
    assert "\n" not in str(refused.value)


def test_weights_name_each_tensor_once() -> None:
    t = trainer()
    tensors = dict(t.weights.tensors())
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors  # tied
    assert all(not tensor.requires_grad for tensor in tensors.values())
    assert tensors["model.norm.weight"].data_ptr() == t.model.get_parameter("model.norm.weight").data_ptr()


def test_the_actor_is_saved_whole_and_replaced_whole(tmp_path: Path) -> None:
    t = trainer()
    folder = tmp_path / "step-000001" / "actor"
    t.save_actor(folder)
    t.step(random_groups())
    t.save_actor(folder)
    assert [p.name for p in folder.parent.iterdir()] == ["actor"]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(0, VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.eval()(input_ids=ids).logits, t.model(input_ids=ids).logits)


def test_an_actor_that_cannot_be_saved_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="save the model"):
        trainer().save_actor(tmp_path / "file" / "actor")
