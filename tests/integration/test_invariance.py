"""How a step is split, over packs and over ranks, changes neither losses nor metrics nor gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn

from stenograph.training.batch import sequence
from stenograph.training.packing import pack
from stenograph.training.ranks import Ranks
from support.ranks import on_ranks
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
PACKS = {10_000: 1, 110: 2, 50: 4, 1: 8}  # pack_max_tokens, and how many packs eight samples come to


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


def assert_equal(actual: Outcome, expected: Outcome) -> None:
    assert actual.numbers == pytest.approx(expected.numbers, rel=1e-6, abs=1e-6)
    assert actual.moments.keys() == expected.moments.keys()
    for model, moments in expected.moments.items():
        assert np.linalg.norm(actual.moments[model] - moments) <= 1e-6 * np.linalg.norm(moments)


@pytest.fixture(scope="module")
def whole() -> Outcomes:
    """By one process, in one pack."""
    return outcomes(None, [10_000])


def test_the_settings_reach_what_they_are_for(whole: Outcomes) -> None:
    sequences = [sequence(sample) for sample in varied_rollouts()]
    assert {size: len(pack(sequences, size)) for size in PACKS} == PACKS
    by_name = {name: outcome.numbers for (name, _), outcome in whole.items()}
    assert all(by_name["grpo, several passes"][f"clip_{side}_fraction"] for side in ("low", "high", "dual"))
    assert by_name["grpo, mean of sequences"]["vetoed_fraction"]
    assert by_name["grpo, mean of sequences"]["rejected_fraction"]
    assert by_name["gae, several passes"]["rejected_fraction"]
    assert by_name["gae, several passes"]["value_clip_fraction"]
    assert by_name["gae, several passes"]["kl_loss"]
    assert by_name["gae"]["kl_reward"]


@pytest.mark.parametrize("max_tokens", list(PACKS)[1:])
def test_packs_change_nothing(max_tokens: int, whole: Outcomes) -> None:
    for (name, size), actual in outcomes(None, [max_tokens]).items():
        assert size == max_tokens
        assert_equal(actual, whole[name, 10_000])


def test_ranks_change_nothing_also_where_one_has_no_share(whole: Outcomes, tmp_path: Path) -> None:
    packs = (10_000, 50)  # of the one pack, the second rank gets nothing
    (first, gradients), (second, others) = on_ranks(on_a_rank, [(packs,), (packs,)], tmp_path)
    assert gradients == others == [3.0, 2.0, None]  # nor are weights without a gradient moved by what was before
    alone = outcomes(None, packs[1:]) | whole
    assert first.keys() == second.keys() == alone.keys()
    for key, actual in first.items():
        assert second[key].numbers == actual.numbers
        assert all(np.array_equal(second[key].moments[model], moments) for model, moments in actual.moments.items())
        assert_equal(actual, whole[key[0], 10_000])
        assert actual.num_forward_tokens == second[key].num_forward_tokens == alone[key].num_forward_tokens
