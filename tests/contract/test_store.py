"""The record: a commit is there whole or not at all, every token is accounted for, samples agree with themselves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from stenograph.config import SelectConfig
from stenograph.errors import TooManyRewards, TraceError
from stenograph.traces.memory import MemoryTraceStore
from stenograph.traces.session import Disposition, Opening
from stenograph.traces.sqlite import SqliteTraceStore
from stenograph.traces.store import TraceStore
from stenograph.types import Sampling
from support.turns import make_turn, user


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TraceStore]:
    store = MemoryTraceStore() if request.param == "memory" else SqliteTraceStore(tmp_path / "traces.db")
    store.open(Opening("s", {"rollout_id": "r", "group_id": "g", "task_id": "t"}))
    with closing(store):
        yield store


def test_a_sample_is_a_branch(store: TraceStore) -> None:
    first = make_turn([1, 2], [3, 4, 5], asked=[user("a")], versions=((0, 7), (2, 8)))
    second = make_turn([6], [7], asked=[user("b")], versions=((0, 9),))
    store.commit("s", None, first)
    store.commit("s", first.id, second)
    store.seal("s", 0.5, "completed")
    (sample,) = store.samples("s")
    assert (sample.rollout_id, sample.group_id, sample.task_id, sample.reward) == ("r", "g", "t", 0.5)
    assert sample.ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert sample.loss_mask.tolist() == [False, False, True, True, True, False, True]
    assert sample.versions.tolist() == [-1, -1, 7, 7, 8, -1, 9]
    assert sample.rollout_logprobs.tolist() == [0, 0, -1, -2, -3, 0, -1]
    assert [(span.turn, span.start, span.end) for span in sample.turns] == [(first.id, 2, 5), (second.id, 6, 7)]


def test_a_token_trains_in_one_sample(store: TraceStore) -> None:
    root = make_turn([1], [2, 3])
    store.commit("s", None, root)
    store.commit("s", root.id, make_turn([4], [5]))
    store.commit("s", root.id, make_turn([6], [7]))
    samples = store.samples("s")
    assert len(samples) == 2
    assert sum(int(sample.loss_mask.sum()) for sample in samples) == 4
    assert samples[0].loss_mask.tolist() == [False, True, True, False, True]
    assert samples[1].loss_mask.tolist() == [False, False, False, False, True]


REASONS = [
    (Sampling(temperature=0), "greedy"),
    (Sampling(top_p=0.9), "truncated_support"),
    (Sampling(top_k=5), "truncated_support"),
    (Sampling(min_p=0.1), "truncated_support"),
    (Sampling(presence_penalty=1), "penalised"),
    (Sampling(frequency_penalty=1), "penalised"),
    (Sampling(repetition_penalty=1.1), "penalised"),
]


@pytest.mark.parametrize(("sampling", "reason"), REASONS, ids=lambda x: x if isinstance(x, str) else "")
def test_what_no_softmax_of_the_trainer_describes_is_masked(store: TraceStore, sampling: Sampling, reason: str) -> None:
    store.commit("s", None, make_turn([1], [2, 3], sampling=sampling))
    (sample,) = store.samples("s")
    assert not sample.loss_mask.any()
    assert (sample.versions >= 0).sum() == 2
    ledger = store.ledger("s")
    assert (ledger.sampled, ledger.masked, ledger.in_flight, ledger.balanced) == (2, {reason: 2}, 0, True)


def test_the_ledger_balances_at_every_stage(store: TraceStore) -> None:
    first = make_turn([1], [2, 3])
    store.commit("s", None, first)
    store.commit("s", first.id, make_turn([4], [5], sampling=Sampling(temperature=0)))
    assert (store.ledger("s").in_flight, store.ledger("s").balanced) == (2, True)
    store.settle("s", Disposition("dropped", "step_skipped"))
    store.settle("s", Disposition("trained"))  # a token is settled once
    ledger = store.ledger("s")
    assert (ledger.dropped, ledger.trained, ledger.masked) == ({"step_skipped": 2}, 0, {"greedy": 1})
    assert ledger.in_flight == 0
    assert ledger.balanced


def test_a_fork_is_recorded_with_the_token_where_it_begins(store: TraceStore) -> None:
    store.commit("s", None, make_turn([1, 2, 3], [4]))
    assert store.drift("s") == []
    fork = make_turn([1, 2, 9], [4])
    store.commit("s", None, fork)
    (drift,) = store.drift("s")
    assert (drift.turn, drift.token, drift.cause) == (fork.id, 2, "unknown")


def test_a_fork_below_a_turn_names_it_and_a_sibling_is_none(store: TraceStore) -> None:
    root = make_turn([1], [2])
    store.commit("s", None, root)
    store.commit("s", None, make_turn([1], [3]))
    store.commit("s", root.id, make_turn([4, 5], [6]))
    assert store.drift("s") == []
    store.commit("s", root.id, make_turn([4, 7], [6]))
    (drift,) = store.drift("s")
    assert (drift.parent_turn, drift.token) == (root.id, 3)


def test_a_sealed_session_takes_nothing_and_a_failed_commit_leaves_nothing(store: TraceStore) -> None:
    turn = make_turn([1], [2])
    store.commit("s", None, turn)
    with pytest.raises(TraceError, match="already"):
        store.commit("s", None, turn)
    store.seal("s", 1.0, "completed")
    store.seal("s")  # idempotent, keeps what was said
    with pytest.raises(TraceError, match="sealed"):
        store.commit("s", None, make_turn([1], [2]))
    info = store.get("s")
    assert (info.state, info.num_turns, info.num_tokens, info.reward, info.status) == ("sealed", 1, 1, 1.0, "completed")
    assert info.policy_versions == (0, 0)
    assert store.drift("s") == []


def rewards(store: TraceStore, select: SelectConfig | None = None) -> list[list[float | None]]:
    """Of the turns of each branch."""
    samples = store.samples("s", select or SelectConfig(unadopted="keep"))
    return [[span.reward for span in sample.turns] for sample in samples]


def test_turn_rewards_follow_the_order_of_the_commits_and_stand_on_every_branch(store: TraceStore) -> None:
    root, other, on, late = (make_turn([n], [n, n]) for n in range(4))
    store.commit("s", None, root, other)  # siblings too, in their order
    store.commit("s", root.id, on)
    store.commit("s", root.id, late)
    assert rewards(store) == [[None], [None, None], [None, None]]
    store.seal("s", 1.0, "completed", [0.1, 1 / 3, -2.0])
    by_turn = {
        span.turn: span.reward for one in store.samples("s", SelectConfig(unadopted="keep")) for span in one.turns
    }
    assert by_turn == {root.id: 0.1, other.id: 1 / 3, on.id: -2.0, late.id: None}
    assert rewards(store) == [[1 / 3], [0.1, -2.0], [0.1, None]]


def test_a_turn_that_a_limit_cuts_keeps_its_reward(store: TraceStore) -> None:
    store.commit("s", None, make_turn([1], [2, 3, 4]))
    store.seal("s", turn_rewards=[0.5])
    assert rewards(store, SelectConfig(max_tokens=2, overlong="truncate")) == [[0.5]]


def test_turn_rewards_are_kept_until_others_are_given(store: TraceStore) -> None:
    first = make_turn([1], [2])
    store.commit("s", None, first)
    store.commit("s", first.id, make_turn([3], [4]))
    for given, kept in (((1.0, 2.0), [1.0, 2.0]), ((), [1.0, 2.0]), ((1.0, 2.0), [1.0, 2.0]), ((3.0,), [3.0, None])):
        store.seal("s", turn_rewards=given)
        assert rewards(store) == [kept]


def test_more_rewards_than_turns_seal_nothing(store: TraceStore) -> None:
    store.commit("s", None, make_turn([1], [2]))
    with pytest.raises(TooManyRewards, match="2 turn rewards were given, and the session has 1 turns; give at most"):
        store.seal("s", 1.0, "completed", [1.0, 2.0])
    info = store.get("s")
    assert (info.state, info.reward, info.status) == ("open", None, None)
    assert rewards(store) == [[None]]
    store.seal("s", 0.0, "error")
    assert (store.get("s").state, rewards(store)) == ("sealed", [[None]])


def test_release_takes_any_ids_and_says_which_it_had(store: TraceStore) -> None:
    store.open(Opening("s2"))
    assert store.release(["s", "unknown", "s", "s2"]) == ["s", "s2"]
    assert store.release(["s"]) == []
    with pytest.raises(TraceError, match="unknown session"):
        store.samples("s")


def test_what_is_released_is_gone_at_once(store: TraceStore) -> None:
    root = make_turn([1, 2], [3])
    store.commit("s", None, root)
    store.commit("s", root.id, make_turn([4], [5]))
    nodes = [weakref.ref(node.ids) for node in store.tree("s").nodes()]
    del root
    gc.disable()  # nothing waits for the garbage collector
    try:
        store.release(["s"])
        assert [node() for node in nodes] == [None] * 4
    finally:
        gc.enable()


def test_a_turn_without_output_is_a_turn(store: TraceStore) -> None:
    store.commit("s", None, make_turn([1, 2], []))
    (sample,) = store.samples("s")
    assert sample.ids.tolist() == [1, 2]
    assert np.array_equal(sample.versions, [-1, -1])
