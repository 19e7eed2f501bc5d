from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.algorithms.advantages import group_advantages


def test_grpo_by_hand() -> None:
    # group a: 0, 1, 2: mean 1, std (n - 1) 1. Group b: 1, 0: mean 0.5, std sqrt(0.5)
    rewards = torch.tensor([0.0, 1.0, 1.0, 2.0, 0.0])
    advantages = group_advantages(rewards, ["a", "b", "a", "a", "b"], kind="grpo")
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 0.70710678, 0.0, 1.0, -0.70710678]), rtol=1e-5, atol=0)


def test_rloo_by_hand() -> None:
    rewards = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    advantages = group_advantages(rewards, torch.tensor([3, 3, 3]), kind="rloo")
    assert advantages.tolist() == [-3.0, -1.5, 4.5]


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[0.3], [0.7] * 7, [0.1] * 3, [-1e30] * 5])
def test_equal_rewards_are_exactly_zero(kind: str, rewards: list[float]) -> None:
    for dtype in (torch.float32, torch.float64):
        advantages = group_advantages(torch.tensor(rewards, dtype=dtype), ["g"] * len(rewards), kind=kind)  # pyright: ignore[reportArgumentType]
        assert advantages.tolist() == [0.0] * len(rewards)


def test_rewards_that_differ_by_rounding_are_not_stretched() -> None:
    rewards = torch.tensor([0.3, 0.1 + 0.2], dtype=torch.float64)
    assert group_advantages(rewards, ["g", "g"], kind="grpo").abs().max() < 1e-9


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10, width=32)), max_size=12), st.sampled_from(["grpo", "rloo"])
)
@settings(max_examples=50, deadline=None)
def test_against_a_reference(rollouts: list[tuple[int, float]], kind: str) -> None:
    expected = []
    for n, (group, reward) in enumerate(rollouts):
        members = [r for g, r in rollouts if g == group]
        others = [r for m, (g, r) in enumerate(rollouts) if g == group and m != n]
        if min(members) == max(members):
            expected.append(0.0)
        elif kind == "grpo":
            expected.append((reward - statistics.fmean(members)) / (statistics.stdev(members) + 1e-6))
        else:
            expected.append(reward - statistics.fmean(others))
    rewards = torch.tensor([r for _, r in rollouts], dtype=torch.float64)
    advantages = group_advantages(rewards, [g for g, _ in rollouts], kind=kind)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("rewards", "groups", "arguments", "message"),
    [
        ([1.0, 2.0], ["a"], {"kind": "grpo"}, "one per rollout"),
        ([1.0, float("nan")], ["a", "a"], {"kind": "grpo"}, "finite"),
        ([1.0], ["a"], {"kind": "reinforce"}, "unknown"),
        ([1.0], ["a"], {"kind": "rloo", "k": 4}, "leave them out"),
    ],
)
def test_wrong_input_is_refused(
    rewards: list[float], groups: list[str], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.tensor(rewards), groups, **arguments)  # pyright: ignore[reportArgumentType]
