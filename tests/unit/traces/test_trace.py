"""A path's ids are exactly what the engine saw, whatever came between."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.errors import TraceError
from stenograph.traces.trace import Output, TraceTree
from support.turns import make_turn, user


def test_a_turn_that_continues_adds_what_is_new() -> None:
    tree = TraceTree()
    first = make_turn([1, 2, 3], [4, 5], asked=[user("a")], said="b")
    second = make_turn([6], [7], asked=[user("c")], said="d")
    tree.add(first, None)
    tree.add(second, first.id)
    assert tree.path_ids(second.id).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert [len(node.ids) for node in tree.nodes()] == [3, 2, 1, 1]
    assert tree.path_turns(second.id) == [first.id, second.id]
    assert [m.content for m in tree.said(second.id)] == ["a", "b", "c", "d"]
    assert tree.leaves() == [second.id]


def test_a_fork_cuts_context_and_never_an_output() -> None:
    tree = TraceTree()
    first = make_turn([1, 2, 3], [4, 5, 6], asked=[user("a")])
    tree.add(first, None)
    assert tree.add(make_turn([1, 2, 9], [7], asked=[user("x")]), None) == 2
    inside_output = make_turn([1, 2, 3, 4, 5, 8], [7], asked=[user("y")])
    assert tree.add(inside_output, None) == 3
    through_output = make_turn([1, 2, 3, 4, 5, 6, 8], [7], asked=[user("z")])
    assert tree.add(through_output, None) is None  # it goes on where a branch ends
    for turn in (inside_output, through_output):
        assert tree.path_ids(turn.id).tolist() == [*turn.context_ids, *turn.output_ids]
    assert tree.path_ids(first.id).tolist() == [1, 2, 3, 4, 5, 6]


def test_what_was_asked_otherwise_below_a_turn_is_a_fork_too() -> None:
    tree = TraceTree()
    first = make_turn([1, 2], [3], asked=[user("a")], said="b")
    tree.add(first, None)
    assert tree.add(make_turn([4, 5], [6], asked=[user("c")]), first.id) is None
    assert tree.add(make_turn([4, 7], [8], asked=[user("d")]), first.id) == 4
    assert tree.add(make_turn([9], [8], asked=[user("e")]), first.id) == 3


def test_ids_that_were_not_kept_are_a_fork_also_where_others_were_told_the_same() -> None:
    tree = TraceTree()
    parent, twin = (make_turn([1, 2], [3, n], asked=[user("a")], said="b") for n in (9, 4))
    tree.add(parent, None)
    tree.add(twin, None)
    rendered = replace(make_turn([1, 2, 3, 4, 5], [6], asked=[user("c")]), extends=False)
    assert tree.add(rendered, parent.id) == 2  # the whole output, though its first id is the same
    assert tree.path_turns(rendered.id) == [twin.id, rendered.id]
    assert tree.parent(rendered.id) == parent.id


def test_a_turn_that_cannot_be_told_leaves_nothing() -> None:
    tree = TraceTree()
    with pytest.raises(TypeError):
        tree.add(make_turn([1], [2], asked=[user("a")], said="\ud800"), None)  # no JSON carries half a character
    assert (list(tree.nodes()), tree.turns, tree.leaves()) == ([], {}, [])


def test_a_turn_is_recorded_once() -> None:
    tree = TraceTree()
    turn = make_turn([1], [2])
    tree.add(turn, None)
    with pytest.raises(TraceError, match="recorded already"):
        tree.add(turn, None)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_path_is_what_was_sent_and_sampled(data: st.DataObject) -> None:
    """Random continuations, repeats and forks over few ids, against an oracle that remembers."""
    ids = st.lists(st.integers(0, 2), min_size=1, max_size=5)
    tree = TraceTree()
    seen: dict[str, list[int]] = {}
    for n in range(data.draw(st.integers(1, 12))):
        parent = data.draw(st.none() | st.sampled_from(sorted(seen))) if seen else None
        turn = make_turn(data.draw(ids), data.draw(ids), asked=[user(str(n))])
        tree.add(turn, parent)
        seen[turn.id] = (seen[parent] if parent else []) + [*turn.context_ids.tolist(), *turn.output_ids.tolist()]
        for name, expected in seen.items():
            assert tree.path_ids(name).tolist() == expected
    for node in tree.nodes():
        assert len(node.ids) > 0
        assert node.parent is not None
        assert node.start == node.parent.end
        assert not isinstance(node, Output) or np.array_equal(node.ids, node.turn.output_ids)


def test_a_context_in_common_is_kept_once() -> None:
    tree = TraceTree()
    system = list(range(20_000))
    for n in range(30):
        tree.add(make_turn([*system, 30_000 + n], [1], asked=[user(f"sub-agent {n}")]), None)
    assert sum(len(node.ids) for node in tree.nodes()) == len(system) + 2 * 30
    assert sum(len(turn.context_ids) for turn in tree.turns.values()) == len(system) + 1 + 29
