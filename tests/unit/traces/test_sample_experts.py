"""Routed experts in samples: at the token that was the input, with a mask, and never some of a branch alone."""

from __future__ import annotations

import base64

import numpy as np
import orjson
import pytest

from stenograph.errors import TraceError
from stenograph.traces.export import sample_row
from stenograph.traces.session import Disposition
from support.recorder import Recorder


@pytest.fixture
def session() -> Recorder:
    return Recorder()


def routing(num_rows: int, first: int, dtype: type[np.generic] = np.uint8) -> np.ndarray:
    """Rows for 2 layers of 3 experts, all of a row the same: `first`, `first` + 1, ..."""
    return np.broadcast_to(np.arange(first, first + num_rows).reshape(-1, 1, 1), (num_rows, 2, 3)).astype(dtype)


def test_experts_stand_at_the_token_that_was_the_input(session: Recorder) -> None:
    first = session.turn(num_context=2, num_output=3, rows=routing(4, 1))  # a row of the prompt, then one a token
    session.turn(first, num_context=2, num_output=2, rows=routing(2, 11))
    (sample,) = session.samples()
    #           prompt | output   | context | output
    expected = [1, 2, 3, 4, 0, 0, 11, 12, 0]
    assert sample.experts is not None
    assert sample.experts_mask is not None
    assert (sample.experts.shape, sample.experts.dtype) == ((9, 2, 3), np.uint8)
    assert sample.experts[:, 1, 2].tolist() == expected
    assert sample.experts_mask.tolist() == [row > 0 for row in expected]


def test_a_later_turn_fills_what_was_unknown_and_no_more(session: Recorder) -> None:
    first = session.turn(num_context=1, num_output=2, rows=routing(2, 1))
    session.turn(first, num_context=1, num_output=1, rows=routing(4, 11, np.uint16))  # it read the whole prompt again
    (sample,) = session.samples()
    assert sample.experts is not None
    assert sample.experts_mask is not None
    assert (sample.experts[:, 0, 0].tolist(), sample.experts.dtype) == ([1, 2, 13, 14, 0], np.uint16)
    assert sample.experts_mask.tolist() == [True] * 4 + [False]


def test_a_truncated_sample_keeps_the_experts_that_are_within_it(session: Recorder) -> None:
    session.turn(num_context=1, num_output=4, rows=routing(4, 1))
    (sample,) = session.samples(max_tokens=3, overlong="truncate")
    assert sample.experts is not None
    assert sample.experts[:, 0, 0].tolist() == [1, 2, 3]


def test_a_branch_of_turns_with_and_without_experts_is_refused_with_both_named(session: Recorder) -> None:
    first = session.turn(rows=routing(2, 1))
    silent = session.turn(first, num_output=0)  # no pass, no experts
    last = session.turn(silent)
    with pytest.raises(TraceError, match=f"session s, branch 0: turn {first.id} has .* turn {last.id} has none"):
        session.samples()
    session.store.settle("s", Disposition("dropped", "rollout_failed"))
    assert session.store.ledger("s").dropped == {"rollout_failed": 4}


def test_a_dense_model_has_no_experts_and_branches_may_differ(session: Recorder) -> None:
    session.turn()
    session.turn(rows=routing(2, 1))
    dense, routed = session.samples()
    assert (dense.experts, dense.experts_mask, sample_row(dense)["experts"]) == (None, None, None)
    assert routed.experts is not None


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (routing(1, 1), "1 rows of experts for 2 tokens after 4 others"),
        (routing(6, 1), "6 rows of experts for 2 tokens after 4 others"),
        (np.zeros((2, 2, 4), np.uint8), r"\(2, 3\) a token, turn \w+ \(2, 4\)"),
    ],
)
def test_experts_that_fit_no_branch_are_refused(session: Recorder, rows: np.ndarray, told: str) -> None:
    first = session.turn(rows=routing(2, 1))
    session.turn(first, rows=rows)
    with pytest.raises(TraceError, match=told):
        session.samples()


def test_a_row_holds_experts_that_can_be_read_back(session: Recorder) -> None:
    session.turn(num_output=3, rows=routing(3, 300, np.uint16))
    (sample,) = session.samples()
    assert sample.experts is not None
    row = orjson.loads(orjson.dumps(sample_row(sample)["experts"], option=orjson.OPT_SERIALIZE_NUMPY))
    read = np.frombuffer(base64.b64decode(row["base64"]), row["dtype"]).reshape(row["shape"])
    assert np.array_equal(read, sample.experts)
    assert (row["dtype"], row["mask"]) == ("uint16", [1, 1, 1, 0])
