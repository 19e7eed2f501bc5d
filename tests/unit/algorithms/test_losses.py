from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stenograph.algorithms.losses import kl, merge_sums, policy_loss

CLIP: dict[str, Any] = {"kind": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3}


def bounds(n: int) -> Tensor:
    return torch.tensor([0, n], dtype=torch.int32)


def test_ppo_clip_by_hand() -> None:
    ratios = [1.0, 1.5, 0.5, 1.5, 0.5]
    advantages = torch.tensor([2.0, 1.0, -1.0, -1.0, 1.0])
    logprobs = torch.tensor([math.log(r) for r in ratios], requires_grad=True)
    mask = torch.ones(5, dtype=torch.bool)
    loss, sums = policy_loss(logprobs, torch.zeros(5), advantages, mask, bounds(5), denominator=10, **CLIP)
    # per token: -2, -1.3 (clipped high), +0.8 (clipped low), +1.5 and -0.5 (the pessimistic side, unclipped)
    assert loss.item() == pytest.approx((-2 - 1.3 + 0.8 + 1.5 - 0.5) / 10)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.2, 0.0, 0.0, 0.15, -0.05])
    assert (sums["num_tokens"], sums["clip_high"], sums["clip_low"]) == (5, 1, 1)
    assert sums["ratio"].item() == pytest.approx(5.0)
    assert sums["ratio_max"].item() == pytest.approx(1.5)
    assert sums["kl_k1"].item() == pytest.approx(-2 * (math.log(1.5) + math.log(0.5)))


def test_dual_clip_bounds_a_negative_advantage() -> None:
    logprobs = torch.tensor([math.log(8.0), math.log(8.0)], requires_grad=True)
    advantages = torch.tensor([-1.0, -0.0])
    mask = torch.ones(2, dtype=torch.bool)
    loss, sums = policy_loss(
        logprobs, torch.zeros(2), advantages, mask, bounds(2), clip_dual=3.0, denominator=1, **CLIP
    )
    loss.backward()
    assert loss.item() == pytest.approx(3.0)
    assert sums["clip_dual"] == 1
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_weights_multiply_the_loss_of_each_token() -> None:
    mask = torch.tensor([True, True, False])
    zeros = torch.zeros(3)
    weights = torch.tensor([0.5, 2.0, math.nan])
    loss, _ = policy_loss(
        zeros, zeros, torch.tensor([1.0, 10.0, 100.0]), mask, bounds(3), weights=weights, denominator=2, **CLIP
    )
    assert loss.item() == pytest.approx(-(0.5 + 20) / 2)


def test_a_ratio_that_overflows_leaves_the_gradient_finite() -> None:
    logprobs = torch.tensor([0.0], requires_grad=True)
    mask = torch.ones(1, dtype=torch.bool)
    loss, _ = policy_loss(logprobs, torch.tensor([-500.0]), torch.ones(1), mask, bounds(1), denominator=1, **CLIP)
    loss.backward()
    assert logprobs.grad is not None
    assert (loss.item(), logprobs.grad.item()) == (pytest.approx(-1.3), 0.0)


def test_unknown_kinds_are_refused() -> None:
    x = torch.zeros(1)
    with pytest.raises(ValueError, match="known: ppo_clip"):
        policy_loss(x, x, x, x.bool(), bounds(1), kind="no", clip_low=0.2, clip_high=0.2, denominator=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="known: k1"):
        kl(x, x, kind="k4")  # pyright: ignore[reportArgumentType]


def reference(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, denominator: float) -> float:
    total = 0.0
    for new, before, advantage, valid in zip(
        logprobs.tolist(), old.tolist(), advantages.tolist(), mask.tolist(), strict=True
    ):
        if valid:
            ratio = math.exp(new - before)
            total -= min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
    return total / denominator


tokens = st.lists(
    st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.floats(-3, 3), st.booleans()), min_size=1, max_size=20
)


@given(tokens, st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 20))
@settings(max_examples=80, deadline=None)
def test_masked_positions_change_nothing_and_splits_add_up(
    rows: list[tuple[float, float, float, bool]], poison: float, split: int
) -> None:
    columns = torch.tensor([r[:3] for r in rows], dtype=torch.float64).T
    mask = torch.tensor([r[3] for r in rows])
    clean = [c.clone() for c in columns]
    dirty = [torch.where(mask, c, poison) for c in columns]
    results = []
    for logprobs, old, advantages in (clean, dirty):
        logprobs = logprobs.requires_grad_()
        loss, sums = policy_loss(logprobs, old, advantages, mask, bounds(len(rows)), denominator=7, **CLIP)
        loss.backward()
        assert logprobs.grad is not None
        assert (logprobs.grad[~mask] == 0).all()
        results.append((loss.item(), logprobs.grad, sums))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]
    assert results[0][0] == pytest.approx(reference(clean[0].detach(), clean[1], clean[2], mask, 7), abs=1e-9)

    parts = []
    for piece in (slice(0, split), slice(split, None)):
        logprobs, old, advantages = (c.detach()[piece] for c in clean)
        parts.append(policy_loss(logprobs, old, advantages, mask[piece], bounds(len(old)), denominator=7, **CLIP))
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(results[0][0], abs=1e-9)
    for name, value in merge_sums(parts[0][1], parts[1][1]).items():
        assert value.item() == pytest.approx(results[0][2][name].item(), abs=1e-9), name


def test_kl_by_hand() -> None:
    logprobs, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert kl(logprobs, ref, kind="k1").tolist() == [0.5, -1.0]
    assert kl(logprobs, ref, kind="k2").tolist() == [0.125, 0.5]
    assert kl(logprobs, ref, kind="k3").tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.e - 2])
    assert kl(logprobs, ref, kind="abs").tolist() == [0.5, 1.0]
    assert kl(logprobs, logprobs, kind="k3").tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimates_are_unbiased(kind: Any) -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    assert (p * kl(p.log(), q.log(), kind=kind)).sum().item() == pytest.approx(exact.item(), abs=1e-12)
