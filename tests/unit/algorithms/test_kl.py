from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.algorithms.gae import gae
from stenograph.algorithms.kl import adapted_beta, kl, kl_loss, penalised_rewards


def test_kl_by_hand() -> None:
    logprobs, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert kl(logprobs, ref, kind="k1").tolist() == [0.5, -1.0]
    assert kl(logprobs, ref, kind="k2").tolist() == [0.125, 0.5]
    assert kl(logprobs, ref, kind="k3").tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.e - 2])
    assert kl(logprobs, ref, kind="abs").tolist() == [0.5, 1.0]
    assert kl(logprobs, logprobs, kind="k3").tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="known: k1"):
        kl(logprobs, ref, kind="k4")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimates_are_unbiased(kind: Any) -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    assert (p * kl(p.log(), q.log(), kind=kind)).sum().item() == pytest.approx(exact.item(), abs=1e-12)


@given(st.floats(-20, 200), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=80, deadline=None)
def test_k3_is_exact_up_to_20_nats_and_keeps_its_gradient(d: float, dtype: torch.dtype) -> None:
    logprobs = torch.tensor(d, dtype=dtype, requires_grad=True)
    estimate = kl(logprobs, torch.zeros((), dtype=dtype), kind="k3")
    estimate.backward()
    assert logprobs.grad is not None
    relative = 1e-6 if dtype == torch.float32 else 1e-12
    d = logprobs.item()
    assert estimate.item() == pytest.approx(math.expm1(-d) + d, rel=relative, abs=1e-6)
    assert logprobs.grad.item() == pytest.approx(-math.expm1(-d), rel=relative, abs=1e-6)


def test_the_gradient_of_k3_at_a_log_ratio_of_7_is_not_clamped_away() -> None:
    logprobs = torch.tensor(-7.0, requires_grad=True)
    kl(logprobs, torch.tensor(0.0), kind="k3").backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(1 - math.exp(7), rel=1e-6)


def test_k3_far_away_is_finite_and_still_pulls() -> None:
    logprobs = torch.tensor([-21.0, -500.0], requires_grad=True)
    estimates = kl(logprobs, torch.zeros(2), kind="k3")
    estimates.sum().backward()
    assert estimates.isfinite().all()
    assert estimates[1] > estimates[0] > math.exp(20)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([1 - math.exp(20)] * 2, rel=1e-6)


def test_k1_as_a_loss_is_refused() -> None:
    x = torch.zeros(1)
    with pytest.raises(ValueError, match='use "k2"'):
        kl_loss(x, x, x.bool(), kind="k1", denominator=1)


def test_the_gradient_of_k2_as_a_loss_is_that_of_the_divergence() -> None:
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits)
    logp = logits.log_softmax(0)
    mask = torch.ones(3, dtype=torch.bool)
    p = logp.detach().exp().tolist()
    # the expectation over tokens that are sampled from the policy
    expected = sum(
        (p[n] * kl_loss(logp[n : n + 1], ref[n : n + 1], mask[:1], kind="k2", denominator=1)[0] for n in range(3)),
        start=torch.zeros((), dtype=torch.float64),
    )
    (gradient,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(gradient, exact)


@pytest.mark.parametrize("kind", ["k2", "k3", "abs"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_the_kl_loss_of_masked_tokens_is_never_read(kind: Any, poison: float) -> None:
    logprobs = torch.tensor([-1.0, poison, -2.0], requires_grad=True)
    ref = torch.tensor([-1.5, -1.0, poison])
    mask = torch.tensor([True, False, False])
    loss, sums = kl_loss(logprobs, ref, mask, kind=kind, denominator=4)
    loss.backward()
    one = kl(torch.tensor(-1.0), torch.tensor(-1.5), kind=kind).item()
    assert loss.item() == pytest.approx(one / 4)
    assert (sums["ref_kl"].item(), sums["num_tokens"]) == (pytest.approx(one), 1)
    assert logprobs.grad is not None
    assert logprobs.grad[0] != 0
    assert logprobs.grad[1:].tolist() == [0.0, 0.0]


def test_kl_in_the_reward_moves_the_first_target_by_all_that_follows() -> None:
    rewards, values = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.zeros(4)
    mask, cu_seqlens = torch.ones(4, dtype=torch.bool), torch.tensor([0, 4])
    estimates = torch.full((4,), 0.5)
    penalised = penalised_rewards(rewards, estimates, mask, beta=0.2)
    _, returns = gae(penalised, values, mask, cu_seqlens, gamma=1.0, lam=1.0)
    assert returns[0].item() - 1.0 == pytest.approx(-0.4)
    # neither what is logged nor the judge's rewards were written over
    assert estimates.tolist() == [0.5] * 4
    assert rewards.tolist() == [0, 0, 0, 1]


def test_kl_of_an_observation_is_no_penalty() -> None:
    penalised = penalised_rewards(
        torch.tensor([1.0, 2.0]), torch.tensor([math.nan, 1.0]), torch.tensor([False, True]), beta=0.5
    )
    assert penalised.tolist() == [1.0, 1.5]


def test_beta_follows_the_divergence_within_a_fifth() -> None:
    settings: dict[str, Any] = {"target_kl": 2.0, "num_rollouts": 10, "horizon": 100}
    assert adapted_beta(0.5, 2.0, **settings) == 0.5
    assert adapted_beta(0.5, 2.2, **settings) == pytest.approx(0.5 * 1.01)
    assert adapted_beta(0.5, 50.0, **settings) == pytest.approx(0.5 * 1.02)
    assert adapted_beta(0.5, 0.0, **settings) == pytest.approx(0.5 * 0.98)
