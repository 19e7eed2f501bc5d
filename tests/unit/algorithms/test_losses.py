from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stenograph.algorithms.losses import policy_loss, value_loss
from stenograph.algorithms.statistics import merge_sums

CLIP: dict[str, Any] = {"kind": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3}
GSPO: dict[str, Any] = CLIP | {"kind": "gspo"}
CISPO: dict[str, Any] = CLIP | {"kind": "cispo"}


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


def test_a_token_of_weight_0_is_outside_the_mask() -> None:
    logprobs = torch.tensor([0.0, math.inf], requires_grad=True)
    loss, sums = policy_loss(
        logprobs,
        torch.zeros(2),
        torch.tensor([1.0, math.nan]),
        torch.ones(2, dtype=torch.bool),
        bounds(2),
        weights=torch.tensor([1.0, 0.0]),
        denominator=2,
        **CLIP,
    )
    loss.backward()
    assert logprobs.grad is not None
    assert (loss.item(), logprobs.grad.tolist(), sums["num_tokens"]) == (-0.5, [-0.5, 0.0], 1)


def test_gspo_by_hand() -> None:
    # two sequences with a gap in the first; their ratios are sqrt(2 * 0.5) = 1 and sqrt(4 * 1) = 2
    logprobs = torch.tensor([2.0, math.nan, 0.5, 4.0, 1.0], dtype=torch.float64).log().requires_grad_()
    mask = torch.tensor([True, False, True, True, True])
    cu_seqlens = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    advantages = torch.tensor([1.0, math.nan, 1.0, -1.0, 1.0])
    loss, sums = policy_loss(logprobs, torch.zeros(5), advantages, mask, cu_seqlens, denominator=1, **GSPO)
    loss.backward()
    assert loss.item() == pytest.approx(-1 - 1 + 2 - 1.3)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1, 0, -1, 2, 0])
    assert sums["clip_high"] == 1
    assert sums["ratio"].item() == pytest.approx(6)


def test_cispo_by_hand() -> None:
    old = torch.tensor([math.log(0.5), math.log(0.5), math.log(0.5)])
    logprobs = torch.tensor([math.log(0.5), math.log(0.9), math.log(0.1)], requires_grad=True)
    advantages = torch.tensor([2.0, 1.0, -1.0])
    mask = torch.ones(3, dtype=torch.bool)
    loss, sums = policy_loss(logprobs, old, advantages, mask, bounds(3), denominator=1, **CISPO)
    loss.backward()
    # ratios 1, 1.8 -> 1.3, 0.2 -> 0.8; every token keeps a gradient
    assert loss.item() == pytest.approx(-2 * math.log(0.5) - 1.3 * math.log(0.9) + 0.8 * math.log(0.1))
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-2.0, -1.3, 0.8])
    assert (sums["clip_high"], sums["clip_low"]) == (1, 1)


def test_dual_clip_is_refused_where_nothing_reads_it() -> None:
    x = torch.zeros(1)
    with pytest.raises(ValueError, match="clip_dual"):
        policy_loss(x, x, x, x.bool(), bounds(1), clip_dual=3.0, denominator=1, **CISPO)


def test_one_denominator_makes_a_mean_over_all_tokens_of_a_batch() -> None:
    # micro-batches of 3 and 7 tokens: means of 0.6 and 0.2, whose mean is 0.4
    parts = [torch.tensor([-0.6] * 3), torch.tensor([-0.2] * 7)]
    losses = []
    for advantages in parts:
        zeros = torch.zeros_like(advantages)
        mask = torch.ones_like(advantages, dtype=torch.bool)
        losses.append(policy_loss(zeros, zeros, advantages, mask, bounds(len(mask)), denominator=10, **CLIP)[0].item())
    assert sum(losses) == pytest.approx(0.32)


def test_weights_make_a_mean_over_sequences() -> None:
    advantages = torch.tensor([-0.6, -0.2, -0.2, -0.2, -0.2])
    mask = torch.ones(5, dtype=torch.bool)
    weights = torch.tensor([1.0, 0.25, 0.25, 0.25, 0.25])
    zeros = torch.zeros(5)
    loss, _ = policy_loss(zeros, zeros, advantages, mask, bounds(5), weights=weights, denominator=2, **CLIP)
    assert loss.item() == pytest.approx(0.4)


def test_value_loss_by_hand() -> None:
    values = torch.tensor([1.0, 3.0, math.nan], requires_grad=True)
    mask = torch.tensor([True, True, False])
    loss, sums = value_loss(values, torch.tensor([0.0, 1.0, math.inf]), mask, denominator=4)
    loss.backward()
    assert loss.item() == 0.5 * (1 + 4) / 4
    assert values.grad is not None
    assert values.grad.tolist() == [0.25, 0.5, 0.0]
    assert (sums["num_tokens"], sums["value_clip"]) == (2, 0)


def test_the_clipped_value_loss_is_the_larger_of_both_errors() -> None:
    # moved past the clip towards the return (cut), away from it (not cut: the larger error is its own), and not past it
    values = torch.tensor([1.0, 1.0, 0.1], requires_grad=True)
    returns = torch.tensor([2.0, -1.0, 5.0])
    mask = torch.ones(3, dtype=torch.bool)
    loss, sums = value_loss(values, returns, mask, old_values=torch.zeros(3), clip=0.2, denominator=1)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (1.8**2 + 2**2 + 4.9**2))
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, 2.0, -4.9])
    assert sums["value_clip"] == 1


def test_half_a_value_clip_is_refused() -> None:
    x = torch.zeros(1)
    with pytest.raises(ValueError, match="give both"):
        value_loss(x, x, x.bool(), clip=0.2, denominator=1)
    with pytest.raises(ValueError, match="give both"):
        value_loss(x, x, x.bool(), old_values=x, denominator=1)


Row = tuple[float, float, float, bool]  # logprob, old logprob, advantage, in the mask


def reference(kind: str, sequences: list[list[Row]], denominator: float) -> float:
    total = 0.0
    for rows in sequences:
        valid = [row for row in rows if row[3]]
        mean = sum(new - old for new, old, _, _ in valid) / max(1, len(valid))
        for new, old, advantage, _ in valid:
            ratio = math.exp(mean if kind == "gspo" else new - old)
            clipped = min(max(ratio, 0.8), 1.3)
            if kind == "cispo":
                total -= clipped * advantage * new
            else:
                total -= min(ratio * advantage, clipped * advantage)
    return total / denominator


rows = st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.floats(-3, 3), st.booleans())
sequences = st.lists(st.lists(rows, max_size=8), min_size=1, max_size=5)
poisons = st.sampled_from([math.nan, math.inf, -math.inf])


def packed(drawn: list[list[Row]]) -> tuple[list[Tensor], Tensor, Tensor]:
    """The three float columns [tokens], the mask and the bounds."""
    flat = [row for one in drawn for row in one]
    columns = [torch.tensor([row[n] for row in flat], dtype=torch.float64) for n in range(3)]
    cu_seqlens = torch.tensor([0, *(len(one) for one in drawn)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return columns, torch.tensor([row[3] for row in flat], dtype=torch.bool), cu_seqlens


@pytest.mark.parametrize("kind", ["ppo_clip", "gspo", "cispo"])
@given(sequences, poisons, st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_masked_positions_change_nothing_and_splits_add_up(
    kind: str, drawn: list[list[Row]], poison: float, split: int
) -> None:
    arguments: dict[str, Any] = CLIP | {"kind": kind}
    clean, mask, cu_seqlens = packed(drawn)
    dirty = [torch.where(mask, c, poison) for c in clean]
    results = []
    for logprobs, old, advantages in (clean, dirty):
        logprobs = logprobs.clone().requires_grad_()
        loss, sums = policy_loss(logprobs, old, advantages, mask, cu_seqlens, denominator=7, **arguments)
        loss.backward()
        assert logprobs.grad is not None
        assert (logprobs.grad[~mask] == 0).all()
        results.append((loss.item(), logprobs.grad, sums))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]
    assert results[0][0] == pytest.approx(reference(kind, drawn, 7), abs=1e-9)

    parts, gradients = [], []
    for piece in (drawn[:split], drawn[split:]):
        (logprobs, old, advantages), mask, cu_seqlens = packed(piece)
        logprobs.requires_grad_()
        parts.append(policy_loss(logprobs, old, advantages, mask, cu_seqlens, denominator=7, **arguments))
        gradients.append(torch.autograd.grad(parts[-1][0], logprobs)[0])
    torch.testing.assert_close(torch.cat(gradients), results[0][1])
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(results[0][0], abs=1e-9)
    for name, value in merge_sums(parts[0][1], parts[1][1]).items():
        assert value.item() == pytest.approx(results[0][2][name].item(), abs=1e-9), name


@given(sequences, poisons, st.sampled_from([None, 0.2, 1.0]), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_value_loss_against_a_reference(drawn: list[list[Row]], poison: float, clip: float | None, split: int) -> None:
    expected = 0.0
    for value, before, target, valid in (row for one in drawn for row in one):
        near = min(max(value, before - (clip or 0)), before + (clip or 0)) if clip else value
        expected += 0.5 * max((value - target) ** 2, (near - target) ** 2) / 7 if valid else 0.0
    results = []
    for piece in (drawn, drawn[:split], drawn[split:]):
        columns, mask, _ = packed(piece)
        values, before, returns = (torch.where(mask, c, poison) for c in columns)
        old_values = before if clip else None
        values.requires_grad_()
        loss, sums = value_loss(values, returns, mask, old_values=old_values, clip=clip, denominator=7)
        loss.backward()
        assert values.grad is not None
        assert values.grad.isfinite().all()
        assert (values.grad[~mask] == 0).all()
        results.append((loss.item(), sums))
    (whole, sums), (a, sums_a), (b, sums_b) = results
    assert whole == pytest.approx(expected, abs=1e-9)
    assert a + b == pytest.approx(expected, abs=1e-9)
    for name, value in merge_sums(sums_a, sums_b).items():
        assert value.item() == pytest.approx(sums[name].item(), abs=1e-9), name
