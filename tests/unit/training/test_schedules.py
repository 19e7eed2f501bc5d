from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from stenograph.config_training import OptimizerConfig
from stenograph.training.schedules import schedule


def optimizer(lr: float = 0.3) -> torch.optim.AdamW:
    return torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=lr)


def rates(config: OptimizerConfig, num_updates: int, count: int) -> list[float]:
    """Of updates 1 to `count`, as an optimizer has them that is stepped."""
    stepped = optimizer()
    follows = schedule(stepped, config, num_updates)
    values = []
    for _ in range(count):
        values.append(stepped.param_groups[0]["lr"])
        stepped.step()
        follows.step()
    return values


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"lr_warmup": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"lr_schedule": "linear"}, [1, 0.75, 0.5, 0.25, 0, 0]),
        ({"lr_schedule": "linear", "lr_min": 0.5}, [1, 0.875, 0.75, 0.625, 0.5, 0.5]),
        ({"lr_schedule": "linear", "lr_warmup": 1}, [1, 0.75, 0.5, 0.25, 0, 0]),
        ({"lr_schedule": "linear", "lr_warmup": 2}, [0.5, 1, 2 / 3, 1 / 3, 0, 0]),
        ({"lr_schedule": "linear", "lr_warmup": 4}, [0.25, 0.5, 0.75, 1, 0, 0]),
        ({"lr_schedule": "cosine"}, [1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4, 0, 0]),
        ({"lr_schedule": "cosine", "lr_warmup": 3, "lr_min": 0.5}, [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.5]),
        ({"lr_schedule": "linear", "lr_warmup": 5, "lr_min": 0.1}, [0.2, 0.4, 0.6, 0.8, 1, 0.1]),
    ],
)
def test_rates_of_four_updates_and_those_past_the_end(settings: dict[str, Any], expected: list[float]) -> None:
    assert rates(OptimizerConfig(lr=1.0, **settings), 4, 6) == pytest.approx(expected, abs=1e-15)


@st.composite
def configs(draw: st.DrawFn) -> OptimizerConfig:
    lr = draw(st.floats(1e-7, 1.0))
    return OptimizerConfig(
        lr=lr,
        lr_min=draw(st.sampled_from([0.0, lr]) | st.floats(0, lr)),
        lr_schedule=draw(st.sampled_from(["constant", "linear", "cosine"])),
        lr_warmup=draw(st.integers(0, 12)),
    )


@given(configs(), st.integers(0, 30))
@example(OptimizerConfig(lr=0.01, lr_min=0.001, lr_schedule="linear"), 3)  # 0.001 + (0.01 - 0.001) is not 0.01
def test_rises_in_the_warm_up_falls_after_it_and_holds_past_the_end(config: OptimizerConfig, num_updates: int) -> None:
    peak = max(1, config.lr_warmup)
    values = rates(config, num_updates, max(peak, num_updates) + 4)
    rising, falling = values[: config.lr_warmup], values[config.lr_warmup :]

    assert all(0 < value <= config.lr for value in rising)
    assert rising == sorted(set(rising))
    assert falling == sorted(falling, reverse=True)
    assert set(values[max(peak, num_updates) :]) == {config.lr if config.lr_schedule == "constant" else config.lr_min}
    if peak <= num_updates:
        assert values[peak - 1] == config.lr  # to the bit, as lr_min is at the end
        assert all(config.lr_min <= value <= config.lr for value in falling)


@given(configs(), st.integers(0, 20), st.integers(0, 30))
def test_begins_anywhere_with_the_rate_that_the_steps_lead_to(
    config: OptimizerConfig, num_updates: int, applied: int
) -> None:
    resumed = optimizer(lr=7.0)
    follows = schedule(resumed, config, num_updates, applied=applied)
    expected = rates(config, num_updates, applied + 2)
    assert resumed.param_groups[0]["lr"] == expected[applied]
    resumed.step()
    follows.step()
    assert resumed.param_groups[0]["lr"] == expected[applied + 1]
    assert follows.last_epoch == applied + 1


def test_every_group_of_an_optimizer_follows() -> None:
    groups = torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (1.0, 9.0)])
    LambdaLR(groups, lambda _: 3.0)  # as a state may have it that was loaded
    schedule(groups, OptimizerConfig(lr=0.5), 3)
    assert [group["lr"] for group in groups.param_groups] == [0.5, 0.5]
