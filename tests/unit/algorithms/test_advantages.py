from __future__ import annotations

import itertools
import statistics
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.algorithms.advantages import AdvantageKind, group_advantages

KINDS = get_args(AdvantageKind)


def arguments(kind: str, num_rollouts: int) -> dict[str, Any]:
    """`kind`, and what it reads."""
    needed: dict[str, dict[str, Any]] = {"opo": {"lengths": torch.arange(1, num_rollouts + 1)}, "pass_at_k": {"k": 2}}
    return {"kind": kind} | needed.get(kind, {})


def advantages(rewards: list[float], kind: str, **given_too: Any) -> list[float]:
    """Of one group."""
    given = torch.tensor(rewards, dtype=torch.float64)
    return group_advantages(given, ["g"] * len(rewards), kind=kind, **given_too).tolist()  # pyright: ignore[reportArgumentType]


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


def test_dr_grpo_by_hand() -> None:
    assert advantages([0, 1, 5], "dr_grpo") == [-2, -1, 3]


def test_opo_weighs_the_baseline_by_length() -> None:
    # (10 * 0 + 30 * 1) / 40
    assert advantages([0, 1], "opo", lengths=torch.tensor([10, 30])) == [-0.75, 0.25]


def test_pass_at_k_by_hand() -> None:
    # four attempts, one right, k = 2: half of the six pairs have it. A wrong one's three pairs: one has it
    right, *wrong = advantages([1, 0, 0, 0], "pass_at_k", k=2)
    assert right == pytest.approx((1 - 0.5) / 0.5, rel=1e-5)
    assert wrong == pytest.approx([(1 / 3 - 0.5) / 0.5] * 3, rel=1e-5)


def test_pass_at_k_is_0_where_every_set_of_k_has_the_same_best() -> None:
    assert advantages([0.1] * 5 + [0], "pass_at_k", k=2) == [0.0] * 6
    assert advantages([1, 0, 0], "pass_at_k", k=3) == [0.0] * 3
    assert advantages([1, 0], "pass_at_k", k=3) == [0.0] * 2


def test_pass_at_1_takes_every_rollout_by_itself() -> None:
    assert advantages([0, 1, 2], "pass_at_k", k=1) == pytest.approx([-((3 / 2) ** 0.5), 0, (3 / 2) ** 0.5], rel=1e-5)


def test_reinforce_pp_takes_mean_and_std_over_all_groups() -> None:
    got = group_advantages(torch.tensor([0.0, 1.0, 2.0]), ["a", "b", "b"], kind="reinforce_pp")
    assert got.tolist() == pytest.approx([-1, 0, 1], rel=1e-5)


def test_reinforce_pp_baseline_takes_the_mean_of_the_group_and_the_std_of_all() -> None:
    rewards = torch.tensor([0.0, 2.0, 7.0, 7.0, 7.0], dtype=torch.float64)
    got = group_advantages(rewards, ["a", "a", "b", "b", "b"], kind="reinforce_pp_baseline")
    # less their means: -1, 1, 0, 0, 0, whose std is sqrt(2 / 4)
    assert got.tolist() == pytest.approx([-(2**0.5), 2**0.5, 0, 0, 0], rel=1e-5)
    assert got[2:].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rewards", [[0.3], [0.7] * 7, [0.1] * 3, [-1e30] * 5])
def test_equal_rewards_are_exactly_zero(kind: str, rewards: list[float]) -> None:
    for dtype in (torch.float32, torch.float64):
        given = torch.tensor(rewards, dtype=dtype)
        assert group_advantages(given, ["g"] * len(rewards), **arguments(kind, len(rewards))).tolist() == [0.0] * len(
            rewards
        )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reinforce_pp"])
def test_a_group_that_teaches_nothing_is_exactly_zero_beside_others(kind: str) -> None:
    rewards = [0.7] * 7 + [0.0, 0.0, 1.0] + [0.3]
    got = group_advantages(torch.tensor(rewards), [*"aaaaaaabbbc"], **arguments(kind, 11)).tolist()
    assert got[:7] + got[10:] == [0.0] * 8
    assert got[7] < 0 < got[9]


@pytest.mark.parametrize("kind", ["grpo", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline"])
def test_rewards_that_differ_by_rounding_are_not_stretched(kind: str) -> None:
    rewards = torch.tensor([0.3, 0.1 + 0.2, 0.3], dtype=torch.float64)
    assert group_advantages(rewards, ["g"] * 3, **arguments(kind, 3)).abs().max() < 1e-9


def reference(kind: str, rewards: list[float], groups: list[int], lengths: list[int], k: int) -> list[float]:
    """Rollout by rollout, and set by set, as the definitions say it."""
    result = []
    for n, reward in enumerate(rewards):
        members = [m for m in range(len(rewards)) if kind == "reinforce_pp" or groups[m] == groups[n]]
        r = [rewards[m] for m in members]
        if min(r) == max(r):
            result.append(0.0)
        elif kind in ("grpo", "reinforce_pp"):
            result.append((reward - statistics.fmean(r)) / (statistics.stdev(r) + 1e-6))
        elif kind == "rloo":
            result.append(reward - statistics.fmean(rewards[m] for m in members if m != n))
        elif kind == "opo":
            weighted = sum(lengths[m] * rewards[m] for m in members) / sum(lengths[m] for m in members)
            result.append(reward - weighted)
        elif kind == "pass_at_k":
            sets = list(itertools.combinations(members, k))
            best = [max(rewards[m] for m in chosen) for chosen in sets]
            own = [b for b, chosen in zip(best, sets, strict=True) if n in chosen]
            spread = statistics.pstdev(best) if sets else 0.0
            result.append((statistics.fmean(own) - statistics.fmean(best)) / (spread + 1e-6) if spread else 0.0)
        else:
            result.append(reward - statistics.fmean(r))
    if kind == "reinforce_pp_baseline" and len(result) > 1:
        result = [advantage / (statistics.stdev(result) + 1e-6) for advantage in result]
    return result


rollouts = st.lists(
    st.tuples(st.integers(0, 3), st.floats(-10, 10, width=32) | st.integers(0, 1), st.integers(1, 9)), max_size=12
)


@pytest.mark.parametrize("kind", KINDS)
@given(rollouts, st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_against_a_reference(kind: str, drawn: list[tuple[int, float, int]], k: int) -> None:
    groups, rewards, lengths = [row[0] for row in drawn], [row[1] for row in drawn], [row[2] for row in drawn]
    given_too = arguments(kind, len(drawn))
    if kind == "pass_at_k":
        given_too["k"] = k
    if kind == "opo":
        given_too["lengths"] = torch.tensor(lengths, dtype=torch.int64)
    got = group_advantages(torch.tensor(rewards, dtype=torch.float64), groups, **given_too)
    expected = torch.tensor(reference(kind, rewards, groups, lengths, k), dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("rewards", "groups", "given_too", "message"),
    [
        ([1.0, 2.0], ["a"], {"kind": "grpo"}, "one per rollout"),
        ([1.0, float("nan")], ["a", "a"], {"kind": "grpo"}, "finite"),
        ([1.0], ["a"], {"kind": "reinforce"}, "unknown"),
        ([1.0], ["a"], {"kind": "rloo", "k": 4}, "leave it out"),
        ([1.0], ["a"], {"kind": "grpo", "lengths": torch.ones(1)}, "leave it out"),
        ([1.0], ["a"], {"kind": "opo"}, "needs `lengths`"),
        ([1.0], ["a"], {"kind": "opo", "lengths": torch.zeros(1)}, "above 0"),
        ([1.0], ["a"], {"kind": "opo", "lengths": torch.ones(2)}, "above 0"),
        ([1.0], ["a"], {"kind": "pass_at_k"}, "needs `k`"),
        ([1.0], ["a"], {"kind": "pass_at_k", "k": 0}, "at least 1"),
    ],
)
def test_wrong_input_is_refused(
    rewards: list[float], groups: list[str], given_too: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.tensor(rewards), groups, **given_too)
