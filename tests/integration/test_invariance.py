"""How a step is split, over packs and over ranks, changes neither losses nor metrics nor gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stenograph.training.batch import sequence
from stenograph.training.packing import pack
from support.ranks import on_ranks
from support.splits import Outcome, Outcomes, on_a_rank, outcomes
from support.steps import varied_rollouts

PACKS = {10_000: 1, 110: 2, 50: 4, 1: 8}  # pack_max_tokens, and how many packs eight samples come to


def assert_equal(actual: Outcome, expected: Outcome) -> None:
    assert actual.numbers == pytest.approx(expected.numbers, rel=1e-6, abs=1e-6)
    assert actual.moments.keys() == expected.moments.keys()
    for model, moments in expected.moments.items():
        assert np.linalg.norm(actual.moments[model] - moments) <= 1e-6 * np.linalg.norm(moments)


@pytest.fixture(scope="module")
def whole() -> Outcomes:
    """By one process, in one pack."""
    return outcomes(None, [10_000])


def test_the_settings_reach_what_they_are_for(whole: Outcomes) -> None:
    sequences = [sequence(sample) for sample in varied_rollouts()]
    assert {size: len(pack(sequences, size)) for size in PACKS} == PACKS
    by_name = {name: outcome.numbers for (name, _), outcome in whole.items()}
    assert all(by_name["grpo, several passes"][f"clip_{side}_fraction"] for side in ("low", "high", "dual"))
    assert by_name["grpo, mean of sequences"]["vetoed_fraction"]
    assert by_name["grpo, mean of sequences"]["rejected_fraction"]
    assert by_name["gae, several passes"]["rejected_fraction"]
    assert by_name["gae, several passes"]["value_clip_fraction"]
    assert by_name["gae, several passes"]["kl_loss"]
    assert by_name["gae"]["kl_reward"]


@pytest.mark.parametrize("max_tokens", list(PACKS)[1:])
def test_packs_change_nothing(max_tokens: int, whole: Outcomes) -> None:
    for (name, size), actual in outcomes(None, [max_tokens]).items():
        assert size == max_tokens
        assert_equal(actual, whole[name, 10_000])


def test_ranks_change_nothing_also_where_one_has_no_share(whole: Outcomes, tmp_path: Path) -> None:
    packs = (10_000, 50)  # of the one pack, the second rank gets nothing
    (first, gradients), (second, others) = on_ranks(on_a_rank, [(packs,), (packs,)], tmp_path)
    assert gradients == others == [3.0, 2.0, None]  # nor are weights without a gradient moved by what was before
    alone = outcomes(None, packs[1:]) | whole
    assert first.keys() == second.keys() == alone.keys()
    for key, actual in first.items():
        assert second[key].numbers == actual.numbers
        assert all(np.array_equal(second[key].moments[model], moments) for model, moments in actual.moments.items())
        assert_equal(actual, whole[key[0], 10_000])
        assert actual.num_forward_tokens == second[key].num_forward_tokens == alone[key].num_forward_tokens
