"""Routed experts in samples: at the token that was the input, with a mask, and never some of a branch alone."""

from __future__ import annotations

import base64

import numpy as np
import orjson
import pytest

from stenograph.errors import TraceError
from stenograph.traces.experts import routed_experts
from stenograph.traces.export import sample_row
from stenograph.traces.session import Disposition
from stenograph.types import Mask, Sample
from support.recorder import Recorder


@pytest.fixture
def session() -> Recorder:
    return Recorder()


def routing(num_rows: int, first: int, dtype: type[np.generic] = np.uint8) -> np.ndarray:
    """Rows for 2 layers of 3 experts, all of a row the same: `first`, `first` + 1, ..."""
    return np.broadcast_to(np.arange(first, first + num_rows).reshape(-1, 1, 1), (num_rows, 2, 3)).astype(dtype)


def read(session: Recorder, sample: Sample) -> tuple[np.ndarray, Mask]:
    routed = routed_experts(sample, session.store.payloads.get)
    assert routed is not None
    return routed


def test_experts_stand_at_the_token_that_was_the_input(session: Recorder) -> None:
    first = session.turn(num_context=2, num_output=3, rows=routing(4, 1))  # a row of the prompt, then one a token
    session.turn(first, num_context=2, num_output=2, rows=routing(2, 11))
    (sample,) = session.samples()
    #           prompt | output   | context | output
    expected = [1, 2, 3, 4, 0, 0, 11, 12, 0]
    experts, known = read(session, sample)
    assert (experts.shape, experts.dtype) == ((9, 2, 3), np.uint8)
    assert experts[:, 1, 2].tolist() == expected
    assert known.tolist() == [row > 0 for row in expected]


def test_a_later_turn_fills_what_was_unknown_and_no_more(session: Recorder) -> None:
    first = session.turn(num_context=1, num_output=2, rows=routing(2, 1))
    session.turn(first, num_context=1, num_output=1, rows=routing(4, 11, np.uint16))  # it read the whole prompt again
    (sample,) = session.samples()
    experts, known = read(session, sample)
    assert (experts[:, 0, 0].tolist(), experts.dtype) == ([1, 2, 13, 14, 0], np.uint16)
    assert known.tolist() == [True] * 4 + [False]


def test_a_truncated_sample_keeps_the_experts_that_are_within_it(session: Recorder) -> None:
    session.turn(num_context=1, num_output=4, rows=routing(4, 1))
    for length in (2, 3, 4, 5):
        (sample,) = session.samples(max_tokens=length, overlong="truncate")
        experts, known = read(session, sample)
        assert experts[:, 0, 0].tolist() == [1, 2, 3, 4, 0][:length]
        assert known.tolist() == [True, True, True, True, False][:length]


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
    read = session.store.payloads.get
    assert (dense.experts, routed_experts(dense, read), sample_row(dense, read)["experts"]) == ((), None, None)
    assert len(routed.experts) == 1


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
    experts, _ = read(session, sample)
    told = sample_row(sample, session.store.payloads.get)["experts"]
    row = orjson.loads(orjson.dumps(told, option=orjson.OPT_SERIALIZE_NUMPY))
    held = np.frombuffer(base64.b64decode(row["base64"]), row["dtype"]).reshape(row["shape"])
    assert np.array_equal(held, experts)
    assert (row["dtype"], row["mask"]) == ("uint16", [1, 1, 1, 0])
