"""Samples and the ledger follow from one selection: each token is where the rules say, and is counted once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.config import SelectConfig
from stenograph.traces.samples import mask_reason
from stenograph.traces.session import Disposition
from stenograph.types import BranchRole, Sample, Sampling, Turn
from support.recorder import TRAINED, Recorder
from support.turns import make_turn


@pytest.fixture
def session() -> Recorder:
    return Recorder()


def held(samples: list[Sample]) -> list[list[str]]:
    return [[span.turn for span in sample.turns] for sample in samples]


def trains(sample: Sample) -> list[str]:
    """The turns whose tokens are all trainable in `sample`; none may be in part."""
    parts = {span.turn: sample.loss_mask[span.start : span.end] for span in sample.turns}
    assert all(part.all() or not part.any() for part in parts.values())
    return [turn for turn, part in parts.items() if part.any()]


# --- siblings ------------------------------------------------------------------------------------------------------


def test_a_sibling_that_the_agent_did_not_build_on_is_dropped_or_kept(session: Recorder) -> None:
    left, taken = session.choices(None, 2)
    last = session.turn(taken)
    assert held(session.samples()) == [[taken.id, last.id]]
    assert held(session.samples(unadopted="keep")) == [[left.id], [taken.id, last.id]]
    assert session.settled() == {"trained": 4, "unadopted": 2}


def test_whether_it_was_delivered_makes_no_sibling_adopted(session: Recorder) -> None:
    left, taken = session.choices(None, 2)
    session.store.mark("s", [left.id], "delivered")
    session.store.mark("s", [taken.id], "undelivered")
    session.turn(taken)
    assert session.settled() == {"trained": 4, "unadopted": 2}


def test_a_sibling_is_built_on_also_where_its_conversation_was_rendered_anew(session: Recorder) -> None:
    root = session.turn()
    _, taken = session.choices(root, 2)
    last = session.turn(taken, extends=False)
    assert held(session.samples()) == [[root.id, taken.id], [last.id]]
    assert session.settled() == {"trained": 6, "unadopted": 2}


def test_a_sibling_is_built_on_also_by_a_conversation_that_has_its_ids_alone(session: Recorder) -> None:
    _, taken = session.choices(None, 2)
    ids = session.store.tree("s").path_ids(taken.id)
    last = make_turn([*ids, 91], [92])
    session.store.commit("s", None, last)
    assert held(session.samples()) == [[taken.id, last.id]]


def test_siblings_of_which_none_is_built_on_are_all_samples(session: Recorder) -> None:
    first = session.turn()
    choices = session.choices(first, 4)
    assert held(session.samples()) == [[first.id, choice.id] for choice in choices]
    assert session.settled() == {"trained": 10}


def test_siblings_that_are_all_built_on_and_the_last_turn_of_a_conversation_are_adopted(session: Recorder) -> None:
    one, other = session.choices(None, 2)
    ends = [session.turn(one), session.turn(other)]
    assert held(session.samples()) == [[one.id, ends[0].id], [other.id, ends[1].id]]
    assert session.settled() == {"trained": 8}


def test_a_fork_is_no_sibling(session: Recorder) -> None:
    first = session.turn()
    gone_on, rewound = session.turn(first), session.turn(first)  # another question to the same answer
    last = session.turn(rewound)
    assert held(session.samples()) == [[first.id, gone_on.id], [first.id, rewound.id, last.id]]


def test_a_prompt_with_which_another_begins_is_no_sibling(session: Recorder) -> None:
    short, long = make_turn([91, 92], [93]), make_turn([91, 92, 94], [95])
    session.store.commit("s", None, short)
    session.store.commit("s", None, long)
    assert held(session.samples()) == [[short.id], [long.id]]


# --- where a shared token trains -----------------------------------------------------------------------------------


def test_a_shared_token_trains_in_the_main_branch_else_in_the_oldest(session: Recorder) -> None:
    root = session.turn()
    shared = session.turn(root)
    helpers = [session.turn(shared, role="sub-agent") for _ in range(2)]
    main = session.turn(root)
    samples = session.samples()
    assert held(samples) == [[root.id, shared.id, helper.id] for helper in helpers] + [[root.id, main.id]]
    assert [trains(s) for s in samples] == [[shared.id, helpers[0].id], [helpers[1].id], [root.id, main.id]]


def test_an_unadopted_main_branch_claims_nothing_before_an_adopted_one(session: Recorder) -> None:
    root = session.turn()
    left, taken = session.choices(root, 2)
    last = session.turn(taken)
    assert [trains(s) for s in session.samples(unadopted="keep")] == [[left.id], [root.id, taken.id, last.id]]


def test_a_main_branch_that_went_on_to_another_role_alone_is_adopted(session: Recorder) -> None:
    root = session.turn()
    helper = session.turn(root, role="sub-agent")
    choices = session.choices(root, 2)
    for choice in choices:
        session.turn(choice, role="compaction")
    assert [trains(s) for s in session.samples()] == [[helper.id], [root.id, choices[0].id], [choices[1].id]]


def test_every_branch_trains_what_it_holds_and_the_ledger_counts_it_once(session: Recorder) -> None:
    root = session.turn()
    ends = session.choices(root, 3)
    assert [trains(s) for s in session.samples(tokens="every_branch")] == [[root.id, end.id] for end in ends]
    assert session.settled(tokens="every_branch") == {"trained": 8}


# --- roles ---------------------------------------------------------------------------------------------------------


def test_a_branch_of_another_role_is_dropped_up_to_what_it_shares(session: Recorder) -> None:
    root = session.turn()
    title = session.turn(root, role="title")
    last = session.turn(root)
    probe = session.turn(role="probe", num_output=3)
    assert held(session.samples()) == [[root.id, last.id]]
    assert held(session.samples(roles=("title", "probe"))) == [[root.id, title.id], [probe.id]]
    assert session.settled() == {"trained": 4, "role": 5}


def test_a_conversation_trains_without_the_compaction_that_ended_it(session: Recorder) -> None:
    talk = [session.turn()]
    talk.append(session.turn(talk[0]))
    session.turn(talk[1], role="compaction")
    anew = session.turn()
    samples = session.samples()
    assert held(samples) == [[turn.id for turn in talk], [anew.id]]
    assert [(sample.branch, sample.role) for sample in samples] == [(0, "main"), (1, "main")]
    assert np.array_equal(samples[0].ids, session.store.tree("s").path_ids(talk[1].id))
    assert session.settled() == {"trained": 6, "role": 2}


@pytest.mark.parametrize("tokens", ["train_once", "every_branch"])
def test_a_turn_of_another_role_on_the_way_is_not_trained(session: Recorder, tokens: str) -> None:
    probe = session.turn(role="probe")
    main = session.turn(probe)
    samples = session.samples(tokens=tokens)
    assert held(samples) == [[probe.id, main.id]]
    assert [trains(sample) for sample in samples] == [[main.id]]
    assert session.settled(tokens=tokens) == {"trained": 2, "role": 2}


def test_where_no_role_is_selected_there_is_no_sample(session: Recorder) -> None:
    session.turn(role="title")
    assert session.samples() == []
    assert session.settled() == {"trained": 0, "role": 2}


# --- length --------------------------------------------------------------------------------------------------------


def test_an_overlong_branch_is_dropped_and_what_it_shares_trains_elsewhere(session: Recorder) -> None:
    root = session.turn()
    long = session.turn(root, num_output=5)
    short = session.turn(root)
    samples = session.samples(max_tokens=6)
    assert held(samples) == [[root.id, short.id]]
    assert trains(samples[0]) == [root.id, short.id]
    assert held(session.samples(max_tokens=9)) == [[root.id, long.id], [root.id, short.id]]  # 9 tokens are not over 9
    assert session.settled(max_tokens=6) == {"trained": 4, "overlong": 5}


def test_a_truncated_branch_ends_within_a_turn(session: Recorder) -> None:
    root = session.turn()
    cut = session.turn(root, num_context=2, num_output=4)
    beyond = session.turn(cut)
    rules = {"max_tokens": 7, "overlong": "truncate"}
    (sample,) = session.samples(**rules)
    assert [(span.turn, span.start, span.end, span.ended_by) for span in sample.turns] == [
        (root.id, 1, 3, "eos"),
        (cut.id, 5, 7, "length"),
    ]
    assert sample.ids.tolist() == [*root.context_ids, *root.output_ids, *cut.context_ids, *cut.output_ids[:2]]
    assert sample.loss_mask.tolist() == [False, True, True, False, False, True, True]
    assert sample.rollout_logprobs.tolist() == [0, -1, -2, 0, 0, -1, -2]
    assert sample.versions.tolist() == [-1, 0, 9, -1, -1, 0, 9]
    assert session.settled(**rules) == {"trained": 4, "overlong": 2 + len(beyond.output_ids)}


def test_a_branch_that_is_cut_between_turns_ends_with_the_turn_before(session: Recorder) -> None:
    root = session.turn()
    session.turn(root, num_context=4)
    (sample,) = session.samples(max_tokens=5, overlong="truncate")
    assert [(span.turn, span.end, span.ended_by) for span in sample.turns] == [(root.id, 3, "length")]
    assert len(sample.ids) == 3  # context that nothing follows is of no use


def test_branches_that_part_beyond_the_limit_are_one_sample(session: Recorder) -> None:
    root = session.turn(num_output=4)
    for _ in range(3):
        session.turn(root)
    rules = {"max_tokens": 4, "overlong": "truncate", "tokens": "every_branch"}
    (sample,) = session.samples(**rules)
    assert (len(sample.ids), int(sample.loss_mask.sum())) == (4, 3)
    assert session.settled(**rules) == {"trained": 3, "overlong": 7}


def test_what_is_left_of_a_truncated_branch_has_a_selected_role(session: Recorder) -> None:
    probe = session.turn(role="probe")
    session.turn(probe, num_context=4)
    assert session.samples(max_tokens=6, overlong="truncate") == []
    assert session.settled(max_tokens=6, overlong="truncate") == {"trained": 0, "overlong": 4}


def test_a_branch_without_a_sampled_token_within_the_limit_is_dropped(session: Recorder) -> None:
    session.turn(num_context=9)
    assert session.samples(max_tokens=9, overlong="truncate") == []
    assert session.settled(max_tokens=9, overlong="truncate") == {"trained": 0, "overlong": 2}


# --- settling ------------------------------------------------------------------------------------------------------


def test_a_skipped_step_drops_what_it_would_have_trained(session: Recorder) -> None:
    _, taken = session.choices(None, 2)
    session.turn(taken)
    session.turn(sampling=Sampling(temperature=0))
    session.store.settle("s", Disposition("dropped", "step_skipped"))
    session.store.settle("s", TRAINED)  # a token is settled once
    ledger = session.store.ledger("s")
    assert (ledger.trained, ledger.masked, ledger.in_flight) == (0, {"greedy": 2}, 0)
    assert ledger.dropped == {"step_skipped": 4, "unadopted": 2}


# --- any tree, any rules -------------------------------------------------------------------------------------------

ROLES: tuple[BranchRole, ...] = ("main", "sub-agent", "compaction", "title", "probe")
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "after": st.none() | st.integers(0, 30),  # which of the turns before it, if any
            "num_choices": st.integers(1, 3),
            "num_context": st.integers(1, 3),
            "num_output": st.integers(0, 4),
            "role": st.sampled_from(ROLES),
            "extends": st.booleans(),
            "sampling": st.sampled_from([Sampling(), Sampling(), Sampling(temperature=0)]),
        }
    ),
    min_size=1,
    max_size=8,
)
RULES = st.fixed_dictionaries(
    {
        "tokens": st.sampled_from(["train_once", "every_branch"]),
        "roles": st.lists(st.sampled_from(ROLES), min_size=1, unique=True).map(tuple),
        "unadopted": st.sampled_from(["drop", "keep"]),
        "max_tokens": st.none() | st.integers(1, 16),
        "overlong": st.sampled_from(["drop", "truncate"]),
    }
)


def recorded(calls: list[dict[str, Any]]) -> tuple[Recorder, list[Turn]]:
    session, turns = Recorder(), []
    for call in calls:
        after, num_choices = call["after"], call["num_choices"]
        rest = {name: value for name, value in call.items() if name not in ("after", "num_choices")}
        parent = turns[after % len(turns)] if turns and after is not None else None
        turns += session.choices(parent, num_choices, **rest)
    return session, turns


@given(CALLS, RULES)
def test_arrays_agree_with_the_turns_and_the_engine(calls: list[dict[str, Any]], rules: dict[str, Any]) -> None:
    session, turns = recorded(calls)
    by_id, tree = {turn.id: turn for turn in turns}, session.store.tree("s")
    for sample in session.samples(**rules):
        assert len({len(sample.ids), len(sample.loss_mask), len(sample.rollout_logprobs), len(sample.versions)}) == 1
        assert np.array_equal(sample.ids, tree.path_ids(sample.turns[-1].turn)[: len(sample.ids)])
        sampled = np.zeros(len(sample.ids), bool)
        for span in sample.turns:
            turn, here = by_id[span.turn], slice(span.start, span.end)
            num_kept = span.end - span.start
            assert span.end <= len(sample.ids)
            assert np.array_equal(sample.ids[here], turn.output_ids[:num_kept])
            assert np.array_equal(sample.rollout_logprobs[here], turn.rollout_logprobs[:num_kept])
            assert sample.versions[here].tolist() == [turn.versions[n > 0][1] for n in range(num_kept)]
            sampled[here] = True
        assert np.array_equal(sample.versions >= 0, sampled)
        assert not sample.rollout_logprobs[~sampled].any()
        assert not (sample.loss_mask & ~sampled).any()
        assert rules["max_tokens"] is None or len(sample.ids) <= rules["max_tokens"]
        assert sample.role in rules["roles"]


@given(CALLS, RULES)
def test_a_token_trains_once_or_wherever_it_is_and_the_ledger_says_so(
    calls: list[dict[str, Any]], rules: dict[str, Any]
) -> None:
    session, turns = recorded(calls)
    greedy = {int(i) for turn in turns if mask_reason(turn.sampling) for i in turn.output_ids}
    samples = session.samples(**rules)
    in_samples = [int(i) for sample in samples for i in sample.ids[sample.versions >= 0]]
    trainable = [int(i) for sample in samples for i in sample.ids[sample.loss_mask]]  # every token has its own number
    others = {int(i) for turn in turns if turn.role not in rules["roles"] for i in turn.output_ids}
    wanted = [i for i in in_samples if i not in greedy | others]
    assert sorted(trainable) == sorted(set(wanted) if rules["tokens"] == "train_once" else wanted)

    sampled = sum(len(turn.output_ids) for turn in turns)
    before = session.store.ledger("s")
    assert (before.in_flight, before.balanced) == (sampled - len(greedy), True)
    session.store.settle("s", TRAINED, SelectConfig(**rules))
    after = session.store.ledger("s")
    assert after.trained == len(set(trainable))
    assert sum(after.masked.values()) == len(greedy)
    assert after.sampled == sampled
    assert (after.in_flight, after.balanced) == (0, True)
    assert set(after.dropped) <= {"unadopted", "role", "overlong"}


@given(CALLS)
def test_with_all_kept_every_branch_is_a_sample_and_nothing_is_dropped(calls: list[dict[str, Any]]) -> None:
    session, _ = recorded(calls)
    everything = {"roles": ROLES, "unadopted": "keep"}
    leaves = session.store.tree("s").leaves()
    assert [turns[-1] for turns in held(session.samples(**everything))] == leaves
    assert [sample.branch for sample in session.samples(**everything)] == list(range(len(leaves)))
    session.store.settle("s", TRAINED, SelectConfig(**everything))
    assert not session.store.ledger("s").dropped
