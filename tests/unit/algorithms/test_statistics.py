from __future__ import annotations

import functools
import math
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stenograph.algorithms.statistics import (
    explained_variance,
    explained_variance_of,
    masked_mean,
    merge_sums,
    value_sums,
    whiten,
)
from support.ranks import measured, on_ranks


def every(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.bool)


def test_whitening_by_hand() -> None:
    x = torch.tensor([1.0, math.nan, 3.0, math.inf])
    whitened = whiten(x, torch.tensor([True, False, True, False]))
    # mean 2, std (n - 1) sqrt(2)
    assert whitened.tolist() == pytest.approx([-(0.5**0.5), 0, 0.5**0.5, 0])
    assert (whitened[1], whitened[3]) == (0, 0)


def test_whitening_finds_the_variance_beside_a_large_mean() -> None:
    x = 10 + 1e-3 * torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    whitened = whiten(x, every(len(x))).double()
    assert whitened.mean().item() == pytest.approx(0, abs=1e-6)
    assert whitened.std().item() == pytest.approx(1, abs=1e-4)


def test_whitening_one_token_subtracts_and_does_not_divide() -> None:
    assert whiten(torch.tensor([5.0, 7.0]), torch.tensor([True, False])).tolist() == [0, 0]
    assert whiten(torch.tensor([5.0]), torch.tensor([False])).tolist() == [0]
    assert whiten(torch.empty(0), every(0)).tolist() == []


def test_whitening_equal_values_does_not_stretch_their_rounding() -> None:
    assert whiten(torch.full((7,), 0.7), every(7)).abs().max() < 1e-6


@given(st.lists(st.tuples(st.floats(-100, 100), st.booleans()), max_size=30))
@settings(max_examples=80, deadline=None)
def test_whitening_against_a_reference(rows: list[tuple[float, bool]]) -> None:
    valid = [value for value, chosen in rows if chosen]
    expected = [0.0] * len(rows)
    if len(valid) > 1:
        mean, std = statistics.fmean(valid), statistics.stdev(valid)
        expected = [(value - mean) / (std + 1e-8) if chosen else 0.0 for value, chosen in rows]
    mask = torch.tensor([chosen for _, chosen in rows], dtype=torch.bool)
    x = torch.tensor([value for value, _ in rows], dtype=torch.float64)
    assert whiten(torch.where(mask, x, math.nan), mask).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_the_mean_is_over_all_selected_tokens() -> None:
    x = torch.tensor([1.0, math.nan, 2.0])
    assert masked_mean(x, torch.tensor([True, False, True])).item() == 1.5
    assert masked_mean(x, torch.zeros(3, dtype=torch.bool)).item() == 0


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([0.0, 2.0, math.nan])
    mask = torch.tensor([True, True, False])
    assert explained_variance(torch.tensor([0.0, 2.0, 9.0]), returns, mask) == 1.0
    assert explained_variance(torch.tensor([5.0, 5.0, 9.0]), returns, mask) == 0.0  # a constant, biased or not
    assert explained_variance(torch.tensor([2.0, 0.0, math.inf]), returns, mask) == -3.0


def test_explained_variance_is_that_of_the_whole_batch() -> None:
    # two micro-batches: the critic knows the mean of each, and nothing within
    far = math.sqrt(24)
    returns = [torch.tensor([-far - 1, -far + 1]).double(), torch.tensor([far - 1, far + 1]).double()]
    values = [torch.full((2,), -far).double(), torch.full((2,), far).double()]
    assert [explained_variance(v, r, every(2)) for v, r in zip(values, returns, strict=True)] == pytest.approx([0, 0])
    parts = [value_sums(v, r, every(2)) for v, r in zip(values, returns, strict=True)]
    assert explained_variance_of(functools.reduce(merge_sums, parts)) == pytest.approx(0.96)
    assert explained_variance(torch.cat(values), torch.cat(returns), every(4)) == pytest.approx(0.96)


@pytest.mark.parametrize("returns", [[], [1.0], [0.7] * 7, [1e6, 1e6 + 0.1], [0.0, 1e-9]])
def test_explained_variance_is_none_where_returns_hardly_vary(returns: list[float]) -> None:
    exact = torch.tensor(returns, dtype=torch.float64)
    assert explained_variance(torch.zeros_like(exact), exact, every(len(returns))) is None


def test_sums_of_different_losses_do_not_merge() -> None:
    with pytest.raises(ValueError, match="differ in \\['b'\\]"):
        merge_sums({"a": torch.zeros(())}, {"a": torch.zeros(()), "b": torch.zeros(())})


@pytest.mark.parametrize("cut", [0, 5])
def test_ranks_with_unequal_shares_come_to_what_one_process_comes_to(cut: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, returns = 10 + torch.randn(2, 12, generator=generator, dtype=torch.float64)
    mask = torch.tensor([True, True, False, True] * 3)
    whole = measured(None, x, returns, mask)
    first, second = on_ranks(
        measured, [(x[:cut], returns[:cut], mask[:cut]), (x[cut:], returns[cut:], mask[cut:])], tmp_path
    )
    assert first["whitened"] + second["whitened"] == pytest.approx(whole["whitened"], rel=1e-12, abs=1e-12)
    for name in ("mean", "explained_variance", "sums"):
        assert first[name] == second[name]
        assert first[name] == pytest.approx(whole[name], rel=1e-12)
