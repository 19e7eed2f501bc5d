from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stenograph.config_training import OptimizerConfig
from stenograph.errors import CheckpointError
from stenograph.training.updates import Applied, Updates

NUM_UPDATES = 6


def model(seed: int = 0, hidden: int = 4) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(3, hidden), nn.Linear(hidden, 2), nn.Linear(2, 2))
    layers[2].requires_grad_(False)
    return layers


def config(**settings: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 0.1, "weight_decay": 0.1, "lr_schedule": "cosine", "lr_min": 0.01, **settings})


def backward(network: nn.Module, seed: int, scale: float = 1.0) -> None:
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    (scale * network(inputs).square().mean()).backward()


def update(network: nn.Module, updates: Updates, seed: int, scale: float = 1.0) -> Applied:
    """One update from gradients that follow from `seed` alone, in two packs."""
    backward(network, seed, scale)
    backward(network, seed + 1000, scale)
    return updates.apply()


def everything(network: nn.Module, updates: Updates) -> list[Tensor]:
    """What an update changes: weights, moments, rate, count."""
    moments = [value for entry in updates.optimizer_state()["state"] for value in entry.values()]
    numbers = [torch.tensor(value, dtype=torch.float64) for value in (updates.lr, updates.applied)]
    return [tensor.detach().clone() for tensor in (*network.state_dict().values(), *moments, *numbers)]


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_update_is_adamw_on_the_clipped_gradient() -> None:
    trained, reference = model(), model()
    updates = Updates(trained, config(max_grad_norm=0.5), NUM_UPDATES)
    optimizer = torch.optim.AdamW([*reference[0].parameters(), *reference[1].parameters()], weight_decay=0.1)
    for seed in range(3):
        optimizer.param_groups[0]["lr"] = updates.lr
        outcome = update(trained, updates, seed, scale=4.0)
        backward(reference, seed, 4.0)
        backward(reference, seed + 1000, 4.0)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert outcome.reason is None
        assert outcome.grad_norm == norm.item() > 0.5
        for a, b in zip(trained.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert (updates.attempted, updates.applied, updates.skipped) == (3, 3, {})
    assert len(updates.parameters) == 4


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("before", [0, 2])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(poison: float, before: int) -> None:
    network = model()
    updates = Updates(network, config(lr_warmup=3), NUM_UPDATES)
    for seed in range(before):
        update(network, updates, seed)
    expected = everything(network, updates)
    backward(network, 9)
    gradient = updates.parameters[-1].grad
    assert gradient is not None
    gradient[1] = poison
    outcome = updates.apply()

    assert outcome.reason == "gradient is not finite"
    assert not math.isfinite(outcome.grad_norm)
    assert equal(everything(network, updates), expected)
    assert updates.skipped == {"gradient is not finite": 1}
    assert (updates.attempted, updates.applied) == (before + 1, before)


def test_a_norm_over_the_limit_changes_nothing_and_one_at_it_is_applied() -> None:
    probe = model()
    norm = update(probe, Updates(probe, config(), NUM_UPDATES), 0).grad_norm

    network = model()
    updates = Updates(network, config(max_grad_norm_skip=norm), NUM_UPDATES)
    expected = everything(network, updates)
    outcome = update(network, updates, 0, scale=1.001)
    assert outcome.reason == "gradient norm over max_grad_norm_skip"
    assert outcome.grad_norm == pytest.approx(1.001 * norm)
    assert equal(everything(network, updates), expected)
    assert update(network, updates, 0) == Applied(norm, None)
    assert not equal(everything(network, updates), expected)
    assert updates.skipped == {"gradient norm over max_grad_norm_skip": 1}
    assert (updates.attempted, updates.applied) == (2, 1)


def test_the_update_after_a_skipped_one_has_exactly_its_own_gradients() -> None:
    """However the update before was skipped, and however much of it was accumulated by then."""
    straight, stumbling = model(), model()
    expected = Updates(straight, config(), NUM_UPDATES)
    updates = Updates(stumbling, config(max_grad_norm_skip=1e3), NUM_UPDATES)
    for seed in range(4):
        update(stumbling, updates, 50 + seed, scale=math.nan)
        backward(stumbling, 60 + seed)
        updates.skip("every gradient is 0")
        update(stumbling, updates, 70 + seed, scale=1e6)
        assert all(p.grad is None for p in stumbling.parameters())
        assert update(stumbling, updates, seed) == update(straight, expected, seed)
        assert equal(everything(stumbling, updates), everything(straight, expected))
    assert updates.skipped == {
        "gradient is not finite": 4,
        "every gradient is 0": 4,
        "gradient norm over max_grad_norm_skip": 4,
    }
    assert (updates.attempted, updates.applied) == (16, 4)


OPTIMIZER, SCHEDULE, WEIGHTS = "optimizer", "schedule", "weights"
ORDERS = [
    (WEIGHTS, OPTIMIZER, SCHEDULE),
    (WEIGHTS, SCHEDULE, OPTIMIZER),
    (OPTIMIZER, WEIGHTS, SCHEDULE),
    (SCHEDULE, OPTIMIZER, WEIGHTS),
    (SCHEDULE, OPTIMIZER, SCHEDULE, WEIGHTS),
    (OPTIMIZER, SCHEDULE, OPTIMIZER, WEIGHTS),
]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("interrupted", [0, 1, 2, 3, 5, 6, 8])  # warm-up: 3; end: 6
@pytest.mark.parametrize("used", [0, 2], ids=["fresh", "used"])
def test_a_resumed_run_has_the_rates_and_weights_of_the_uninterrupted(
    order: tuple[str, ...], kind: str, interrupted: int, used: int
) -> None:
    settings = config(lr_schedule=kind, lr_warmup=3)
    network = model()
    updates = Updates(network, settings, NUM_UPDATES)
    for seed in range(interrupted):
        update(network, updates, seed)
        updates.skip("no trainable tokens")
    saved = copy.deepcopy((network.state_dict(), updates.optimizer_state(), updates.schedule_state()))
    before = copy.deepcopy(saved)

    other = model(seed=1)
    resumed = Updates(other, settings, NUM_UPDATES)
    for seed in range(used):
        update(other, resumed, 90 + seed)
    load = {
        WEIGHTS: lambda: other.load_state_dict(saved[0]),
        OPTIMIZER: lambda: resumed.load_optimizer(saved[1]),
        SCHEDULE: lambda: resumed.load_schedule(saved[2]),
    }
    for part in order:
        load[part]()
    assert resumed.lr == updates.lr  # before its first step
    assert (resumed.applied, resumed.skipped, resumed.attempted) == (interrupted, updates.skipped, 2 * interrupted)
    for seed in range(interrupted, NUM_UPDATES + 3):
        assert resumed.lr == updates.lr
        assert update(other, resumed, seed) == update(network, updates, seed)
        assert equal(everything(other, resumed), everything(network, updates))
    resumed.skip("every gradient is 0")
    assert resumed.skipped == {**updates.skipped, "every gradient is 0": 1}

    moments = [value for entry in saved[1]["state"] for value in entry.values()]
    assert equal(moments, [value for entry in before[1]["state"] for value in entry.values()])  # what was read stays
    assert saved[2] == before[2]


def test_either_part_may_be_loaded_alone() -> None:
    network = model()
    settings = config(lr_warmup=3)
    updates = Updates(network, settings, NUM_UPDATES)
    for seed in range(4):
        update(network, updates, seed)

    moments = Updates(model(), settings, NUM_UPDATES)
    moments.load_optimizer(updates.optimizer_state())
    assert (moments.lr, moments.applied) == (Updates(model(), settings, NUM_UPDATES).lr, 0)
    assert [float(entry["step"]) for entry in moments.optimizer_state()["state"]] == [4.0] * 4

    rate = Updates(model(), settings, NUM_UPDATES)
    rate.load_schedule(updates.schedule_state())
    assert (rate.lr, rate.applied) == (updates.lr, 4)
    assert rate.optimizer_state() == {"state": [{}] * 4}


def test_a_changed_configuration_holds() -> None:
    network = model()
    updates = Updates(network, config(), NUM_UPDATES)
    for seed in range(3):
        update(network, updates, seed)
    changed = config(lr=0.7, weight_decay=0.3, lr_schedule="linear", lr_min=0.1)
    resumed = Updates(network, changed, 12)
    resumed.load_schedule(updates.schedule_state())
    resumed.load_optimizer(updates.optimizer_state())
    assert resumed.lr == pytest.approx(0.7 - 0.6 * 3 / 12)
    assert resumed.optimizer.param_groups[0]["weight_decay"] == 0.3


@pytest.mark.parametrize(
    ("other", "num_updates"),
    [
        (model(hidden=5), 1),
        (nn.Linear(3, 4), 1),  # the same moments as far as they go
        (nn.Linear(3, 4), 0),
        (nn.Sequential(model(), nn.Linear(2, 2)), 1),
    ],
)
def test_the_moments_of_another_model_are_refused_in_one_line(other: nn.Module, num_updates: int) -> None:
    foreign = Updates(other, config(), NUM_UPDATES)
    for seed in range(num_updates):
        update(other, foreign, seed)
    network = model()
    updates = Updates(network, config(), NUM_UPDATES)
    update(network, updates, 0)
    expected = everything(network, updates)
    with pytest.raises(CheckpointError) as error:
        updates.load_optimizer(foreign.optimizer_state())
    assert "\n" not in str(error.value)
    assert equal(everything(network, updates), expected)


def test_a_parameter_that_never_had_a_gradient_has_no_moments_and_is_resumed_so() -> None:
    network = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    updates = Updates(network, config(), NUM_UPDATES)
    network[0](torch.ones(3)).sum().backward()
    updates.apply()
    state = updates.optimizer_state()
    assert [set(entry) for entry in state["state"]] == [{"step", "exp_avg", "exp_avg_sq"}] * 2 + [set()] * 2

    other = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    resumed = Updates(other, config(), NUM_UPDATES)
    update(other, resumed, 0)
    other.load_state_dict(network.state_dict())
    resumed.load_optimizer(state)
    resumed.load_schedule(updates.schedule_state())
    for seed in range(2):
        assert update(other, resumed, seed) == update(network, updates, seed)
        assert equal(everything(other, resumed), everything(network, updates))


def test_moments_that_are_incomplete_are_refused() -> None:
    network = model()
    updates = Updates(network, config(), NUM_UPDATES)
    update(network, updates, 0)
    state = copy.deepcopy(updates.optimizer_state())
    del state["state"][2]["exp_avg_sq"]
    with pytest.raises(CheckpointError, match="parameter 2"):
        updates.load_optimizer(state)


def test_what_a_checkpoint_lacks_is_said_and_stays_as_it_is() -> None:
    network = model()
    updates = Updates(network, config(), NUM_UPDATES)
    update(network, updates, 0)
    updates.skip("no trainable tokens")
    expected = everything(network, updates)
    with pytest.warns(UserWarning, match="no moments"):
        updates.load_optimizer({})
    with pytest.warns(UserWarning, match="applied = 1, skipped"):
        updates.load_schedule({})
    assert equal(everything(network, updates), expected)
    assert updates.skipped == {"no trainable tokens": 1}

    with pytest.warns(UserWarning, match="skipped"):
        updates.load_schedule({"applied": 5})
    assert (updates.applied, updates.attempted) == (5, 6)
    with pytest.warns(UserWarning, match="applied = 5"):
        updates.load_schedule({"skipped": {"every gradient is 0": 2}})
    assert (updates.applied, updates.attempted) == (5, 7)


def test_moments_move_and_parameters_stay() -> None:
    network = model()
    updates = Updates(network, config(), NUM_UPDATES)
    updates.move("meta")  # there is nothing yet
    update(network, updates, 0)
    moments = [value for entry in updates.optimizer_state()["state"] for value in entry.values()]
    updates.move("cpu")
    stayed = [value for entry in updates.optimizer_state()["state"] for value in entry.values()]
    assert all(a is b for a, b in zip(moments, stayed, strict=True))

    updates.move("meta")
    moved = [value for entry in updates.optimizer_state()["state"] for value in entry.values()]
    assert len(moved) == 12
    assert {value.device.type for value in moved} == {"meta"}
    assert {parameter.device.type for parameter in network.parameters()} == {"cpu"}
