"""A path's ids are exactly what the engine saw, whatever came between."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.errors import TraceError
from stenograph.traces.trace import TraceTree
from stenograph.types import Conversation, Message, Reply, Tool, ToolCall
from support.turns import asking, make_turn, user


def test_a_turn_that_continues_adds_what_is_new() -> None:
    tree = TraceTree()
    first = make_turn([1, 2, 3], [4, 5], asked=[user("a")], said="b")
    second = make_turn([6], [7], asked=[user("c")], said="d")
    tree.add(first, None)
    match = tree.match(asking("a", "b", "c"))
    assert match is not None
    assert (match.turn, match.num_known) == (first.id, 2)
    tree.add(second, match.turn)
    assert tree.path_ids(second.id).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert [len(node.ids) for node in tree.nodes()] == [3, 2, 1, 1]
    assert tree.path_turns(second.id) == [first.id, second.id]
    assert [m.content for m in tree.conversation(second.id).messages] == ["a", "b", "c"]
    assert tree.leaves() == [second.id]


def test_the_deepest_turn_is_matched_and_a_repeat_is_a_sibling() -> None:
    tree = TraceTree()
    first, second = make_turn([1], [2], asked=[user("a")], said="b"), make_turn([3], [4], asked=[user("c")], said="d")
    tree.add(first, None)
    tree.add(second, first.id)
    deepest, repeat = tree.match(asking("a", "b", "c", "d", "e")), tree.match(asking("a", "b", "c"))
    assert deepest is not None
    assert repeat is not None
    assert (deepest.turn, repeat.turn) == (second.id, first.id)
    sibling = make_turn([3], [5], asked=[user("c")], said="x")
    assert tree.add(sibling, repeat.turn) is None  # the context is shared: no fork
    assert len(list(tree.nodes())) == 5
    assert tree.leaves() == [second.id, sibling.id]


@pytest.mark.parametrize(
    "said",
    [("A", "b", "c"), ("a", "B", "c"), ("a",), ("a", "b")],
    ids=["another question", "an edited answer", "no answer yet", "nothing new"],
)
def test_what_was_not_said_is_not_matched(said: tuple[str, ...]) -> None:
    tree = TraceTree()
    tree.add(make_turn([1], [2], asked=[user("a")], said="b"), None)
    assert tree.match(asking(*said)) is None


def test_other_tools_are_another_conversation() -> None:
    tree = TraceTree()
    tree.add(make_turn([1], [2], asked=[user("a")], said="b"), None)
    assert tree.match(asking("a", "b", "c", tools=(Tool("t", "", {}),))) is None


def test_ids_and_spelling_of_calls_do_not_part_conversations() -> None:
    tree = TraceTree()
    turn = make_turn([1], [2], asked=[user("a")])
    object.__setattr__(turn, "reply", Reply("", "", (ToolCall("call_1", "f", "{}"),)))
    tree.add(turn, None)
    echoed = Message("assistant", tool_calls=(ToolCall("other", "f", "{}"),))
    assert tree.match(Conversation((user("a"), echoed, Message("tool", "x", tool_call_id="other")))) is not None
    respelled = Message("assistant", tool_calls=(ToolCall("call_1", "f", "{ }"),))
    assert tree.match(Conversation((user("a"), respelled, Message("tool", "x")))) is not None
    changed = Message("assistant", tool_calls=(ToolCall("call_1", "f", '{"a": 1}'),))
    assert tree.match(Conversation((user("a"), changed, Message("tool", "x")))) is None


def test_of_equal_replies_the_one_whose_calls_came_back_is_meant() -> None:
    tree = TraceTree()
    choices = []
    for n in range(3):
        turn = make_turn([1], [2], asked=[user("a")])
        choices.append(replace(turn, reply=Reply("", "", (ToolCall(f"call_{n}", "f", "{}"),))))
    tree.add_siblings(choices, None)
    result = Message("tool", "x")
    for choice in choices:
        match = tree.match(Conversation((user("a"), choice.reply.message(), result)))
        assert match is not None
        assert match.turn == choice.id
    unknown = Message("assistant", tool_calls=(ToolCall("theirs", "f", "{}"),))
    match = tree.match(Conversation((user("a"), unknown, result)))
    assert match is not None
    assert match.turn == choices[0].id  # what clients take where they do not choose


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
        outputs = tree.turns[node.turn].output_ids if node.turn else None
        assert outputs is None or np.array_equal(node.ids, outputs)


def test_a_context_in_common_is_kept_once() -> None:
    tree = TraceTree()
    system = list(range(20_000))
    for n in range(30):
        tree.add(make_turn([*system, 30_000 + n], [1], asked=[user(f"sub-agent {n}")]), None)
    assert sum(len(node.ids) for node in tree.nodes()) == len(system) + 2 * 30
    assert sum(len(turn.context_ids) for turn in tree.turns.values()) == len(system) + 1 + 29
