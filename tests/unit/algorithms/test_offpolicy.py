from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stenograph.algorithms.losses import policy_loss
from stenograph.algorithms.offpolicy import importance_weights
from stenograph.algorithms.statistics import merge_sums


def bounds(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


# Two sequences: ratios 4 and 1/4 with a masked token between, then 3 and 3.
OLD = torch.tensor([4.0, math.nan, 0.25, 3.0, 3.0], dtype=torch.float64).log()
ROLLOUT = torch.tensor([0.0, math.inf, 0.0, 0.0, 0.0], dtype=torch.float64)
MASK = torch.tensor([True, False, True, True, True])
BOUNDS = bounds(3, 2)


def weigh(**arguments: Any) -> tuple[list[float], dict[str, float]]:
    weights, sums = importance_weights(OLD, ROLLOUT, MASK, BOUNDS, **arguments)
    return weights.tolist(), {name: value.item() for name, value in sums.items()}


@pytest.mark.parametrize(
    ("level", "bound", "limits", "expected"),
    [
        ("token", "truncate", {"high": 100.0}, [4, 0, 0.25, 3, 3]),
        ("token", "truncate", {"high": 2.0}, [2, 0, 0.25, 2, 2]),
        ("token", "mask", {"high": 3.5, "low": 0.5}, [0, 0, 0, 3, 3]),
        ("sequence", "truncate", {"high": 5.0}, [1, 0, 1, 5, 5]),
        ("sequence", "mask", {"high": 5.0}, [1, 0, 1, 0, 0]),
        ("geometric", "truncate", {"high": 2.0}, [1, 0, 1, 2, 2]),
        ("geometric", "mask", {"high": 5.0, "low": 2.0}, [0, 0, 0, 3, 3]),
    ],
)
def test_weights_by_hand(level: str, bound: str, limits: dict[str, float], expected: list[float]) -> None:
    assert weigh(level=level, bound=bound, **limits)[0] == pytest.approx(expected)


def test_a_veto_rejects_the_whole_sequence_of_an_unlikely_token() -> None:
    weights, sums = weigh(level="token", bound="truncate", high=10.0, veto=0.3)
    assert weights == pytest.approx([0, 0, 0, 3, 3])
    assert (sums["vetoed"], sums["rejected"], sums["truncated"]) == (2, 2, 0)
    assert weigh(level="token", bound="truncate", high=10.0, veto=0.2)[1]["vetoed"] == 0


def test_sums_count_what_happened() -> None:
    _, sums = weigh(level="token", bound="truncate", high=3.5)
    assert (sums["num_tokens"], sums["truncated"], sums["rejected"]) == (4, 1, 0)
    assert sums["weight"] == pytest.approx(3.5 + 0.25 + 3 + 3)
    assert sums["weight_squared"] == pytest.approx(3.5**2 + 0.25**2 + 9 + 9)
    assert sums["weight_max"] == pytest.approx(3.5)
    assert sums["rollout_kl_k1"] == pytest.approx(-2 * math.log(3))
    assert sums["rollout_kl_k3"] == pytest.approx(3 + 2 * (2 - math.log(3)) + 0.25 - 1)
    _, sums = weigh(level="token", bound="mask", high=3.5)
    assert (sums["truncated"], sums["rejected"]) == (0, 1)


def test_a_ratio_that_overflows_stays_finite() -> None:
    weights, sums = importance_weights(
        torch.tensor([0.0, -900.0]),
        torch.tensor([-900.0, 0.0]),
        torch.ones(2, dtype=torch.bool),
        bounds(1, 1),
        level="sequence",
        bound="truncate",
        high=2.0,
    )
    assert weights.tolist() == pytest.approx([2.0, 0.0], abs=1e-8)
    assert all(value.isfinite() for value in sums.values())


@pytest.mark.parametrize("counted", [True, False])
def test_rejected_tokens_count_in_the_denominator_as_the_caller_says(counted: bool) -> None:
    old, mask = torch.log(torch.tensor([1.0, 1.0, 9.0, 1.0])), torch.ones(4, dtype=torch.bool)
    weights, sums = importance_weights(
        old, torch.zeros(4), mask, bounds(4), level="token", bound="mask", high=2.0, low=0.5
    )
    denominator = (sums["num_tokens"] - (0 if counted else sums["rejected"])).item()
    loss, _ = policy_loss(
        old,
        old,
        torch.tensor([-1.0, -1.0, math.nan, -1.0]),
        mask,
        bounds(4),
        kind="ppo_clip",
        clip_low=0.2,
        clip_high=0.2,
        weights=weights,
        denominator=denominator,
    )
    assert loss.item() == pytest.approx(3 / 4 if counted else 1)
    assert mask.all()  # what gae walks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"level": "turn"}, "known: token"),
        ({"bound": "clip"}, "known: token"),
        ({"low": 0.5}, "truncate takes high alone"),
        ({"bound": "mask", "low": 3.0}, "low < high"),
        ({"high": 0.0}, "low < high"),
        ({"veto": 0.0}, "above 0"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weigh(**{"level": "token", "bound": "truncate", "high": 2.0} | change)


Row = tuple[float, float, bool]  # old, rollout, in the mask


def reference(sequences: list[list[Row]], level: str, bound: str, low: float, veto: float | None) -> list[float]:
    weights = []
    for rows in sequences:
        d = [old - rollout for old, rollout, valid in rows if valid]
        is_vetoed = veto is not None and any(math.exp(x) < veto for x in d)
        for old, rollout, valid in rows:
            if not valid or is_vetoed:
                weights.append(0.0)
                continue
            log_ratio = {"token": old - rollout, "sequence": sum(d), "geometric": sum(d) / len(d)}[level]
            ratio = math.exp(min(max(log_ratio, -20), 20))
            kept = min(ratio, 2.0) if bound == "truncate" else ratio * (low <= ratio <= 2.0)
            weights.append(kept)
    return weights


sequences = st.lists(
    st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.booleans()), max_size=6), min_size=1, max_size=5
)


@given(
    sequences,
    st.sampled_from(["token", "sequence", "geometric"]),
    st.sampled_from([("truncate", None), ("mask", None), ("mask", 0.5)]),
    st.sampled_from([None, 0.1]),
    st.integers(0, 5),
)
@settings(max_examples=150, deadline=None)
def test_against_a_reference(
    drawn: list[list[Row]], level: Any, bound: tuple[Any, float | None], veto: float | None, split: int
) -> None:
    results = []
    for piece in (drawn, drawn[:split], drawn[split:]):
        flat = [row for one in piece for row in one]
        mask = torch.tensor([row[2] for row in flat], dtype=torch.bool)
        columns = [torch.tensor([row[n] for row in flat], dtype=torch.float64) for n in range(2)]
        old, rollout = (torch.where(mask, column, math.nan) for column in columns)
        cu_seqlens = bounds(*(len(one) for one in piece))
        settings_ = {"level": level, "bound": bound[0], "high": 2.0, "low": bound[1], "veto": veto}
        weights, sums = importance_weights(old, rollout, mask, cu_seqlens, **settings_)
        assert weights.tolist() == pytest.approx(reference(piece, level, bound[0], bound[1] or 0, veto), abs=1e-9)
        results.append(sums)
    whole, first, second = results
    for name, value in merge_sums(first, second).items():
        assert value.item() == pytest.approx(whole[name].item(), abs=1e-9), name
