from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stenograph.algorithms.gae import gae, length_adaptive_lam


def bounds(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def flags(pattern: str) -> Tensor:
    """[tokens] bool: an action at each "a"."""
    return torch.tensor([letter == "a" for letter in pattern])


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_three_actions_by_hand() -> None:
    advantages, returns = gae(floats(0, 0, 1), floats(0.5, 0.25, 0.75), flags("aaa"), bounds(3), gamma=0.5, lam=0.5)
    # deltas -0.375, 0.125, 0.25; A3 = 0.25, A2 = 0.125 + 0.25 A3, A1 = -0.375 + 0.25 A2
    assert advantages.tolist() == [-0.328125, 0.1875, 0.25]
    assert returns.tolist() == [0.171875, 0.4375, 1.0]


@pytest.mark.parametrize("noise", [9.0, math.nan, math.inf, -math.inf])
def test_values_of_observations_change_nothing(noise: float) -> None:
    values, mask = floats(0.1, 0.2, 0.3, 0.4), flags("oaooaaoao")
    rewards = torch.zeros(9).double()
    rewards[7] = 1.0
    expected, expected_returns = gae(rewards[mask], values, flags("aaaa"), bounds(4), gamma=0.9, lam=0.95)
    scattered = torch.full((9,), noise, dtype=torch.float64).masked_scatter(mask, values)
    advantages, returns = gae(rewards, scattered, mask, bounds(9), gamma=0.9, lam=0.95)
    assert torch.equal(advantages[mask], expected)
    assert torch.equal(returns[mask], expected_returns)
    assert advantages[~mask].tolist() == returns[~mask].tolist() == [0.0] * 5


def test_a_reward_on_an_observation_belongs_to_the_action_before_it_undiscounted() -> None:
    # between two actions, behind the last one, before the first one
    rewards = floats(64, 0, 1, 2, 0, 4, 8)
    advantages, returns = gae(rewards, torch.zeros(7).double(), flags("oaooaoo"), bounds(7), gamma=0.5, lam=1.0)
    assert returns.tolist() == [0, 3 + 0.5 * 12, 0, 0, 12, 0, 0]
    assert advantages.tolist() == returns.tolist()


def test_a_reward_on_an_observation_stays_in_its_sequence() -> None:
    rewards = floats(0, 1, 2, 0, 4)
    _, returns = gae(rewards, torch.zeros(5).double(), flags("aooao"), bounds(2, 3), gamma=1.0, lam=1.0)
    assert returns.tolist() == [1, 0, 0, 4, 0]


def test_what_is_no_number_on_an_observation_is_no_reward() -> None:
    rewards = floats(math.nan, 0, math.inf, 1, -math.inf)
    _, returns = gae(rewards, torch.zeros(5).double(), flags("oaoao"), bounds(5), gamma=1.0, lam=1.0)
    assert returns.tolist() == [0, 1, 0, 1, 0]


def test_a_bootstrap_follows_the_last_action_of_a_truncated_sequence() -> None:
    mask, cu_seqlens = flags("aoao" + "oo" + "a"), bounds(4, 2, 1)
    _, returns = gae(
        torch.zeros(7), torch.zeros(7), mask, cu_seqlens, gamma=0.5, lam=1.0, bootstrap=torch.tensor([8.0, 99.0, 0.0])
    )
    assert returns.tolist() == [2, 0, 4, 0, 0, 0, 0]


def test_the_first_action_of_a_sequence_is_not_seen_by_the_one_before() -> None:
    one, _ = gae(torch.ones(2), torch.ones(2), flags("aa"), bounds(2), gamma=1.0, lam=0.9)
    packed, _ = gae(torch.ones(6), torch.ones(6), flags("aaaaaa"), bounds(2, 0, 2, 2), gamma=1.0, lam=0.9)
    assert torch.equal(packed, one.repeat(3))


def test_lambda_may_differ_by_sequence() -> None:
    rewards, values = floats(0, 1, 0, 1), floats(0.5, 0.5, 0.5, 0.5)
    lams = torch.tensor([0.0, 1.0])
    advantages, _ = gae(rewards, values, flags("aaaa"), bounds(2, 2), gamma=1.0, lam=lams)
    assert advantages.tolist() == [0.0, 0.5, 0.5, 0.5]


def test_turns_have_a_gamma_and_a_lambda_of_their_own() -> None:
    # turn 1 "aa", observation, turn 2 "a"; only the last action is rewarded, and all values are 0 but the last one's
    rewards, values = floats(0, 0, 0, 1), floats(0, 0, 9, 0.5)
    case = Case(rewards, values, flags("aaoa"), bounds(4), gamma=1.0, lam=1.0)
    turn_ids = torch.tensor([1, 1, 7, 2])
    advantages, _ = replace(case, turns={"turn_ids": turn_ids, "turn_gamma": 0.5, "turn_lam": 0.25}).computed()
    # at the turn's end 0.5 V' + 0.5 * 0.25 A' with V' = A' = 0.5
    assert advantages.tolist() == [0.3125, 0.3125, 0, 0.5]
    by_default, _ = replace(case, gamma=0.5, turns={"turn_ids": turn_ids}).computed()
    assert by_default.tolist() == [0.5, 1, 0, 0.5]


def test_a_new_turn_in_another_sequence_ends_nothing() -> None:
    bootstrap = floats(4, 4)
    _, returns = gae(
        torch.zeros(2),
        torch.zeros(2),
        flags("aa"),
        bounds(1, 1),
        gamma=0.5,
        lam=1.0,
        bootstrap=bootstrap,
        turn_ids=torch.tensor([1, 2]),
        turn_gamma=0.0,
    )
    assert returns.tolist() == [2, 2]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["values", "rewards"])
def test_an_action_that_is_no_number_spoils_those_before_it_in_its_sequence_alone(name: str, broken: float) -> None:
    case = Case(torch.ones(9), torch.zeros(9), flags("aaaaaaaaa"), bounds(3, 3, 3), gamma=1.0, lam=0.5)
    expected, _ = case.computed()
    getattr(case, name)[4] = broken
    advantages, returns = case.computed()
    assert torch.equal(advantages[[0, 1, 2, 5, 6, 7, 8]], expected[[0, 1, 2, 5, 6, 7, 8]])
    assert not advantages[3:5].isfinite().any()
    assert not returns[3:4].isfinite().any()


def test_long_chains_neither_underflow_nor_drift() -> None:
    n = 20_000
    rewards = torch.zeros(n)
    rewards[-1] = 1.0
    advantages, _ = gae(rewards, torch.zeros(n), torch.ones(n).bool(), bounds(n), gamma=1.0, lam=1.0)
    assert advantages.tolist() == [1.0] * n
    advantages, _ = gae(torch.ones(n), torch.zeros(n), torch.ones(n).bool(), bounds(n), gamma=0.5, lam=1.0)
    torch.testing.assert_close(advantages[: n - 60], torch.full((n - 60,), 2.0), rtol=1e-6, atol=0)


def test_float32_values_that_are_large_beside_their_advantages_stay_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    n = 4096
    case = Case(
        rewards=torch.zeros(n),
        values=3000 + torch.randn(n, generator=generator),
        action_mask=torch.ones(n).bool(),
        cu_seqlens=bounds(n),
        gamma=1.0,
        lam=1.0,
        bootstrap=torch.tensor([3000.0]),
    )
    advantages, _ = case.computed()
    expected, _ = case.reference()
    assert (advantages.double() - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


def test_no_gradient_flows_into_targets() -> None:
    values = torch.ones(2, requires_grad=True)
    advantages, returns = gae(torch.ones(2), values, flags("aa"), bounds(2), gamma=1.0, lam=1.0)
    assert not advantages.requires_grad
    assert not returns.requires_grad


def test_low_precision_values_give_float32() -> None:
    values = torch.ones(2, dtype=torch.bfloat16)
    advantages, returns = gae(torch.ones(2), values, flags("aa"), bounds(2), gamma=1.0, lam=1.0)
    assert advantages.dtype == returns.dtype == torch.float32


@pytest.mark.parametrize(("mask", "lengths"), [("", ()), ("", (0, 0)), ("ooo", (1, 2)), ("o", (1,)), ("a", (1,))])
def test_nothing_to_do_is_no_special_case(mask: str, lengths: tuple[int, ...]) -> None:
    n = len(mask)
    advantages, _ = gae(torch.ones(n), torch.zeros(n), flags(mask).bool(), bounds(*lengths), gamma=1.0, lam=1.0)
    assert advantages.tolist() == [float(letter == "a") for letter in mask]


def test_lambda_that_adapts_to_the_number_of_actions() -> None:
    mask = torch.cat([flags("o" * 10 + "a" * 40), flags("a" * 5), flags("ooo"), flags("a" * 200)])
    lam = length_adaptive_lam(mask, bounds(50, 5, 3, 200), alpha=0.05)
    assert lam.tolist() == pytest.approx([0.5, 0.0, 0.0, 0.9])
    advantages, _ = gae(torch.ones(258), torch.zeros(258), mask, bounds(50, 5, 3, 200), gamma=1.0, lam=lam)
    assert advantages[50:55].tolist() == [1.0] * 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.zeros(3)}, r"rewards has shape \(3,\), expected \(2,\)"),
        ({"action_mask": torch.ones(2, 1).bool()}, "action_mask"),
        ({"cu_seqlens": bounds(3)}, "rise from 0"),
        ({"cu_seqlens": torch.tensor([0, 3, 2])}, "rise from 0"),
        ({"lam": torch.ones(2)}, "lam"),
        ({"bootstrap": torch.ones(2)}, "bootstrap"),
        ({"gamma": 1.5}, "gamma must lie"),
        ({"lam": torch.tensor([-0.1])}, "lam must lie"),
        ({"turn_gamma": 0.9}, "give turn_ids"),
        ({"turn_lam": 0.9}, "give turn_ids"),
    ],
)
def test_wrong_input_is_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "rewards": torch.zeros(2),
        "values": torch.zeros(2),
        "action_mask": torch.ones(2).bool(),
        "cu_seqlens": bounds(2),
        "gamma": 1.0,
        "lam": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        gae(**given | change)


@dataclass(frozen=True)
class Case:
    rewards: Tensor
    values: Tensor
    action_mask: Tensor
    cu_seqlens: Tensor
    gamma: float
    lam: float | Tensor
    bootstrap: Tensor | None = None
    turns: dict[str, Any] = field(default_factory=dict)

    def computed(self) -> tuple[Tensor, Tensor]:
        return gae(
            self.rewards,
            self.values,
            self.action_mask,
            self.cu_seqlens,
            gamma=self.gamma,
            lam=self.lam,
            bootstrap=self.bootstrap,
            **self.turns,
        )

    def reference(self) -> tuple[Tensor, Tensor]:
        """Action by action in float64, as the definition says it."""
        advantages = torch.zeros(len(self.values), dtype=torch.float64)
        returns = torch.zeros_like(advantages)
        bounds = self.cu_seqlens.tolist()
        for n in range(len(bounds) - 1):
            lam = self.lam[n].item() if isinstance(self.lam, Tensor) else self.lam
            after = self.bootstrap[n].item() if self.bootstrap is not None else 0.0
            advantage, following, reward = 0.0, None, 0.0
            for t in range(bounds[n + 1] - 1, bounds[n] - 1, -1):
                told = self.rewards[t].item()
                if not self.action_mask[t]:
                    reward += told if math.isfinite(told) else 0.0
                    continue
                gamma, decay = self.gamma, lam
                if self.turns and following is not None and self.turns["turn_ids"][t] != following:
                    gamma = self.turns["turn_gamma"]
                    decay = self.turns["turn_lam"] if self.turns["turn_lam"] is not None else lam
                value = self.values[t].item()
                advantage = reward + told + gamma * after - value + gamma * decay * advantage
                after, reward = value, 0.0
                following = self.turns["turn_ids"][t] if self.turns else 0
                advantages[t], returns[t] = advantage, advantage + value
        return advantages, returns


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(0, 40) | st.integers(60, 150), max_size=6))
    n = sum(lengths)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    density = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    mask = torch.rand(n, generator=generator) < density
    rewards = torch.randn(n, generator=generator) * (torch.rand(n, generator=generator) < draw(st.floats(0, 1)))
    fractions = st.sampled_from([0.0, 0.3, 0.95, 1.0])
    per_sequence = draw(st.booleans())
    turns = {
        "turn_ids": torch.randint(0, 3, (n,), generator=generator),
        "turn_gamma": draw(fractions),
        "turn_lam": draw(fractions | st.none()),
    }
    return Case(
        rewards=rewards,
        values=torch.randn(n, generator=generator) * draw(st.sampled_from([0.0, 1.0, 100.0])),
        action_mask=mask,
        cu_seqlens=bounds(*lengths),
        gamma=draw(fractions),
        lam=torch.rand(len(lengths), generator=generator) if per_sequence else draw(fractions),
        bootstrap=torch.randn(len(lengths), generator=generator) if draw(st.booleans()) else None,
        turns=turns if draw(st.booleans()) else {},
    )


@given(cases(), st.sampled_from([9.0, math.nan, math.inf]))
@settings(max_examples=150, deadline=None)
def test_against_a_reference_whatever_observations_hold(case: Case, noise: float) -> None:
    expected, expected_returns = case.reference()
    noisy = replace(case, values=torch.where(case.action_mask, case.values, noise))
    advantages, returns = noisy.computed()
    allowed = 1e-5 * max(1.0, expected.abs().max().item() if len(expected) else 0.0)
    assert (advantages.double() - expected).abs().amax().item() <= allowed if len(expected) else True
    torch.testing.assert_close(returns.double(), expected_returns, rtol=1e-5, atol=allowed)
    assert (advantages[~case.action_mask] == 0).all()
    assert (returns[~case.action_mask] == 0).all()


@given(cases())
@settings(max_examples=50, deadline=None)
def test_packing_changes_nothing(case: Case) -> None:
    packed, _ = case.computed()
    edges = case.cu_seqlens.tolist()
    for n in range(len(edges) - 1):
        own = slice(edges[n], edges[n + 1])
        alone = Case(
            rewards=case.rewards[own],
            values=case.values[own],
            action_mask=case.action_mask[own],
            cu_seqlens=bounds(edges[n + 1] - edges[n]),
            gamma=case.gamma,
            lam=case.lam[n : n + 1] if isinstance(case.lam, Tensor) else case.lam,
            bootstrap=case.bootstrap[n : n + 1] if case.bootstrap is not None else None,
            turns=case.turns and case.turns | {"turn_ids": case.turns["turn_ids"][own]},
        )
        torch.testing.assert_close(alone.computed()[0], packed[own], rtol=1e-6, atol=1e-6)
