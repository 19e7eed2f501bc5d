"""A request goes on from the turn that it means: equal messages, or differences of a known kind and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from stenograph.dialects.minted import call_id, turn_id
from stenograph.traces.matching import Match, Matcher
from stenograph.traces.trace import TraceTree
from stenograph.types import Conversation, Message, Reply, Tool, ToolCall, Turn
from support.turns import asking, make_turn, user


def result(text: str, id: str | None = None) -> Message:
    return Message("tool", text, tool_call_id=id)


def calling(*calls: ToolCall, content: str = "", reasoning: str = "") -> Reply:
    return Reply(content, reasoning, calls)


def add(tree: TraceTree, asked: Sequence[Message], reply: Reply, parent: Turn | None = None) -> Turn:
    turn = replace(make_turn([len(tree.turns)], [len(tree.turns) + 1000], asked=asked), reply=reply)
    tree.add(turn, parent.id if parent is not None else None)
    return turn


def match(tree: TraceTree, *messages: Message, matcher: Matcher | None = None) -> Match | None:
    return (matcher or Matcher()).match(tree, Conversation(messages))


def test_the_deepest_turn_is_matched() -> None:
    tree = TraceTree()
    first = add(tree, [user("a")], Reply("b"))
    second = add(tree, [user("c")], Reply("d"), first)
    deepest, repeat = (Matcher().match(tree, asking(*said)) for said in ("abcde", "abc"))
    assert deepest is not None
    assert repeat is not None
    assert (deepest.turn, deepest.num_known, deepest.accepted) == (second.id, 4, ())
    assert (repeat.turn, repeat.num_known) == (first.id, 2)


@pytest.mark.parametrize(
    "said",
    [("A", "b", "c"), ("a", "B", "c"), ("a",), ("a", "b")],
    ids=["another question", "an edited answer", "no answer yet", "nothing new"],
)
def test_what_was_not_said_is_not_matched(said: tuple[str, ...]) -> None:
    tree = TraceTree()
    add(tree, [user("a")], Reply("b"))
    assert Matcher().match(tree, asking(*said)) is None


def test_other_tools_are_another_conversation() -> None:
    tree = TraceTree()
    add(tree, [user("a")], Reply("b"))
    assert Matcher().match(tree, asking("a", "b", "c", tools=(Tool("t", "", {}),))) is None


def test_a_known_difference_is_accepted_named_and_taken_back() -> None:
    tree = TraceTree()
    turn = add(tree, [user("a")], calling(ToolCall("call_1", "f", '{"x": 1}'), reasoning="why"))
    came = Message("assistant", tool_calls=(ToolCall("theirs", "f", '{"x":1}'),))
    found = match(tree, user("a"), came, result("r", "theirs"))
    assert found is not None
    assert (found.turn, found.num_known) == (turn.id, 2)
    assert found.accepted == ("arguments_respelled", "ids_changed", "reasoning_dropped")
    # What is known stands as it is recorded, and what is new refers to the recorded calls.
    assert found.asked.messages == (user("a"), turn.reply.message(), result("r", "call_1"))


def test_a_difference_accepted_before_is_found_by_its_digest_again() -> None:
    tree, matcher = TraceTree(), Matcher()
    first = add(tree, [user("a")], Reply("b", "why"))
    assert match(tree, user("a"), Message("assistant", "b"), user("c"), matcher=matcher) is not None
    second = add(tree, [user("c")], Reply("d", "because"), first)
    said = (user("a"), Message("assistant", "b"), user("c"), Message("assistant", "d"), user("e"))
    for _ in range(2):
        found = match(tree, *said, matcher=matcher)
        assert found is not None
        assert (found.turn, found.accepted) == (second.id, ("reasoning_dropped",))


def test_an_equivalence_that_is_off_is_a_fork() -> None:
    tree = TraceTree()
    add(tree, [user("a")], Reply("b", "why"))
    said = (user("a"), Message("assistant", "b"), user("c"))
    assert match(tree, *said, matcher=Matcher(allowed=("ids_changed",))) is None
    assert match(tree, *said) is not None


def test_an_id_of_ours_does_not_excuse_another_difference() -> None:
    tree = TraceTree()
    turn = add(tree, [user("a")], calling(ToolCall("call_0123456789abcdef_0", "f", "{}"), content="text"))
    edited = replace(turn.reply.message(), content="another text")
    assert match(tree, user("a"), edited, result("r", "call_0123456789abcdef_0")) is None


def siblings(tree: TraceTree, *replies: Reply) -> list[Turn]:
    turns = [replace(make_turn([1], [2], asked=[user("a")]), reply=reply) for reply in replies]
    tree.add_siblings(turns, None)
    return turns


def test_of_equal_replies_the_one_whose_calls_came_back_is_meant() -> None:
    tree = TraceTree()
    choices = siblings(tree, *(calling(ToolCall(f"call_{n}", "f", "{}")) for n in range(3)))
    for choice in choices:
        found = match(tree, user("a"), choice.reply.message(), result("x"))
        assert found is not None
        assert (found.turn, found.accepted) == (choice.id, ())
    found = match(tree, user("a"), calling(ToolCall("theirs", "f", "{}")).message(), result("x"))
    assert found is not None
    assert found.turn == choices[0].id  # what clients take where they do not choose


def test_of_equal_replies_the_one_that_an_id_names_is_meant() -> None:
    tree = TraceTree()
    choices = siblings(tree, Reply("b", "why"), Reply("b", "why"))
    for choice in choices:
        found = match(tree, user("a"), replace(choice.reply.message(), turn=choice.id), user("c"))
        assert found is not None
        assert found.turn == choice.id


def test_of_replies_that_differ_in_what_was_dropped_the_named_one_is_meant() -> None:
    tree = TraceTree()
    choices = siblings(tree, Reply("b", "why"), Reply("b", "because"), Reply("b", "so"))
    for choice in choices:
        found = match(tree, user("a"), Message("assistant", "b", turn=choice.id), user("c"))
        assert found is not None
        assert found.turn == choice.id


def test_a_difference_is_followed_where_it_leads_furthest() -> None:
    tree = TraceTree()
    choices = siblings(tree, Reply("b", "why"), Reply("b", "because"))
    further = add(tree, [user("c")], Reply("d"), choices[1])
    found = match(tree, user("a"), Message("assistant", "b"), user("c"), Message("assistant", "d"), user("e"))
    assert found is not None
    assert found.turn == further.id


CALLS = tuple(ToolCall(f"call_{n}", "f", "{}") for n in range(3))


def test_results_in_another_order_are_the_same_results() -> None:
    tree = TraceTree()
    first = add(tree, [user("a")], calling(*CALLS))
    results = [result(f"r{n}", f"call_{n}") for n in range(3)]
    second = add(tree, results, Reply("done"), first)
    said = (user("a"), first.reply.message(), results[2], results[0], results[1], second.reply.message(), user("b"))
    found = match(tree, *said)
    assert found is not None
    assert (found.turn, found.accepted) == (second.id, ("results_reordered",))
    assert found.asked.messages[2:5] == tuple(results)
    off = match(tree, *said, matcher=Matcher(allowed=("ids_changed",)))
    assert off is not None
    assert off.turn == first.id


def test_results_that_changed_places_with_their_ids_are_others() -> None:
    tree = TraceTree()
    calls = tuple(ToolCall(f"call_0123456789abcdef_{n}", "f", "{}") for n in range(2))
    first = add(tree, [user("a")], calling(*calls))
    add(tree, [result("x", calls[0].id), result("y", calls[1].id)], Reply("done"), first)
    crossed = (result("x", calls[1].id), result("y", calls[0].id))
    found = match(tree, user("a"), first.reply.message(), *crossed, Message("assistant", "done"), user("b"))
    assert found is not None
    assert found.turn == first.id


def test_what_stands_in_a_client_may_change_anywhere() -> None:
    """Also in messages that it sent itself, before any reply."""
    tree = TraceTree()
    header = "x-billing-header: version=1.2.{};\n\nBe brief."
    turn = add(tree, [Message("system", header.format("abc")), user("a")], Reply("b"))
    found = match(tree, Message("system", header.format("def")), user("a"), Message("assistant", "b"), user("c"))
    assert found is not None
    assert (found.turn, found.accepted) == (turn.id, ("header_changed",))
    assert found.asked.messages[0].content == header.format("abc")


def test_a_session_of_many_branches_and_turns_is_searched_without_recursion() -> None:
    tree, matcher = TraceTree(), Matcher()
    said: list[Message] = []
    turn = None
    for n in range(2000):
        question = user(str(n))
        turn = add(tree, [question], Reply(f"reply {n}", "why"), turn)
        said += [question, Message("assistant", f"reply {n}")]
    assert turn is not None
    found = match(tree, *said, user("?"), matcher=matcher)
    assert found is not None
    assert (found.turn, found.num_known) == (turn.id, 4000)


def test_an_equal_message_that_leads_nowhere_hides_no_other() -> None:
    tree = TraceTree()
    header = "x-billing-header: version=1.2.{};\n\nBe brief."
    one, other = (Message("system", header.format(name)) for name in ("abc", "def"))
    meant = add(tree, [one, user("a")], Reply("b"))
    add(tree, [other, user("another")], Reply("c"))
    found = match(tree, other, user("a"), Message("assistant", "b"), user("d"))
    assert found is not None
    assert (found.turn, found.accepted) == (meant.id, ("header_changed",))


def parallel(tree: TraceTree, *texts: str) -> tuple[Turn, Turn]:
    first = add(tree, [user("a")], calling(*CALLS[: len(texts)]))
    return first, add(tree, [result(text, f"call_{n}") for n, text in enumerate(texts)], Reply("done"), first)


def test_results_in_another_order_and_with_other_ids_are_the_same_results() -> None:
    tree = TraceTree()
    _, second = parallel(tree, "x", "y", "z")
    theirs = calling(*(replace(call, id=f"mine_{n}") for n, call in enumerate(CALLS))).message()
    results = [result("y", "mine_1"), result("z", "mine_2"), result("x", "mine_0")]
    for _ in range(2):
        found = match(tree, user("a"), theirs, *results, Message("assistant", "done"), user("b"))
        assert found is not None
        assert (found.turn, found.accepted) == (second.id, ("ids_changed", "results_reordered"))
    crossed = [result("y", "mine_0"), result("z", "mine_1"), result("x", "mine_2")]
    other = match(tree, user("a"), theirs, *crossed, Message("assistant", "done"), user("b"))
    assert other is not None
    assert other.turn != second.id


def test_results_in_another_order_are_found_beside_others_of_the_same_calls() -> None:
    tree = TraceTree()
    first, second = parallel(tree, "x", "y")
    add(tree, [result("x", "call_0"), result("edited", "call_1")], Reply("other"), first)
    said = (user("a"), first.reply.message(), result("y", "call_1"), result("x", "call_0"))
    found = match(tree, *said, second.reply.message(), user("b"))
    assert found is not None
    assert found.turn == second.id


def test_results_in_another_order_may_be_respelled_too() -> None:
    tree = TraceTree()
    first, second = parallel(tree, "x\n", "y")
    said = (user("a"), first.reply.message(), result("y", "call_1"), result("x", "call_0"))
    found = match(tree, *said, second.reply.message(), user("b"))
    assert found is not None
    assert (found.turn, found.accepted) == (second.id, ("results_reordered", "whitespace_dropped"))


def test_results_without_ids_answer_the_calls_in_their_order() -> None:
    tree = TraceTree()
    first = add(tree, [user("a")], calling(*CALLS[:2]))
    came = calling(*(replace(call, id="") for call in CALLS[:2])).message()
    found = match(tree, user("a"), came, result("x", ""), result("y"))
    assert found is not None
    assert found.turn == first.id
    assert [message.tool_call_id for message in found.asked.messages[2:]] == ["call_0", "call_1"]


def test_ids_that_a_client_uses_again_are_those_of_the_last_reply() -> None:
    tree = TraceTree()
    first = add(tree, [user("a")], calling(ToolCall("call_1", "f", "{}")))
    second = add(tree, [result("x", "call_1")], calling(ToolCall("call_2", "g", "{}")), first)
    theirs = [calling(ToolCall("0", name, "{}")).message() for name in ("f", "g", "h")]
    said = (user("a"), theirs[0], result("x", "0"), theirs[1], result("y", "0"))
    found = match(tree, *said, theirs[2], result("z", "0"))
    assert found is not None
    assert found.turn == second.id
    # The last reply is none of ours, so its result refers to it as it came.
    assert [message.tool_call_id for message in found.asked.messages if message.role == "tool"] == [
        "call_1",
        "call_2",
        "0",
    ]


@pytest.mark.parametrize("num_choices", [3, 1500])
def test_of_any_number_of_replies_the_named_one_is_meant(num_choices: int) -> None:
    tree = TraceTree()
    choices = siblings(tree, *(Reply("b", f"why {n}") for n in range(num_choices)))
    found = match(tree, user("a"), Message("assistant", "b", turn=choices[-1].id), user("c"))
    assert found is not None
    assert found.turn == choices[-1].id  # the one that was told first


def test_what_is_equal_to_the_end_hides_no_reply_beside_it() -> None:
    tree = TraceTree()
    header = "x-billing-header: version=1.2.{};\n\nBe brief."
    one, other = (Message("system", header.format(name)) for name in ("abc", "def"))
    meant = add(tree, [one, user("a")], Reply("b"))
    add(tree, [other, user("a"), Message("assistant", "b"), user("resumed")], Reply("c"))
    found = match(tree, other, user("a"), Message("assistant", "b"), user("d"))
    assert found is not None
    assert found.turn == meant.id


def test_a_question_that_follows_no_reply_is_compared_with_nothing() -> None:
    tree = TraceTree()
    for n in range(3):
        add(tree, [Message("system", f"agent {n}"), user("a")], Reply("b"))
    assert match(tree, Message("system", "agent 9"), user("a"), user("c")) is None


def test_requests_go_on_from_where_the_one_before_led() -> None:
    """What an earlier request of the conversation led over is neither looked up nor compared again."""
    tree, matcher = TraceTree(), Matcher()
    said: list[Message] = [user("0")]
    turn = add(tree, said, Reply("reply 0", "why"))
    for n in range(1, 2000):
        said += [Message("assistant", f"reply {n - 1}"), user(str(n))]
        found = match(tree, *said, matcher=matcher)
        assert found is not None
        assert (found.turn, found.num_known, found.accepted) == (turn.id, 2 * n, ("reasoning_dropped",))
        assert found.asked.messages[1].reasoning == "why"
        turn = add(tree, said[-1:], Reply(f"reply {n}", "why"), turn)
    del matcher, tree  # nothing in them is freed by recursion


def test_an_earlier_request_does_not_hide_what_was_recorded_since() -> None:
    tree, matcher = TraceTree(), Matcher()
    question, answer = user("a"), Message("assistant", "b")
    add(tree, [question], Reply("b", "why"))
    assert match(tree, question, answer, user("c"), matcher=matcher) is not None
    later = siblings(tree, Reply("b", "because"))[0]
    further = add(tree, [user("c")], Reply("d"), later)
    found = match(tree, question, answer, user("c"), Message("assistant", "d"), user("e"), matcher=matcher)
    assert found is not None
    assert found.turn == further.id


def test_conversations_at_the_same_time_go_on_each_from_its_own() -> None:
    tree, matcher = TraceTree(), Matcher()
    turns = [add(tree, [user(f"agent {n}")], Reply("b", "why")) for n in range(40)]
    said = [[user(f"agent {n}"), Message("assistant", "b")] for n in range(40)]
    for _ in range(3):
        for n, turn in enumerate(turns):
            found = match(tree, *said[n], user("go on"), matcher=matcher)
            assert found is not None
            assert found.turn == turn.id


@pytest.mark.parametrize("rest", ["", "I "])
def test_what_arrived_of_a_reply_that_broke_off_is_part_of_what_came_instead(rest: str) -> None:
    """An empty message stands before another try; a text is what the next reply goes on from."""
    tree = TraceTree()
    first = add(tree, [user("a")], calling(*CALLS[:1], content="I call."))
    second = add(tree, [result("x", "call_0")], Reply("done"), first)
    other = replace(first.reply.message(), content="I call."[len(rest) :])
    said = (user("a"), Message("assistant", rest), other, result("x", "call_0"), second.reply.message(), user("b"))
    found = match(tree, *said)
    assert found is not None
    assert (found.turn, found.num_known, found.accepted) == (second.id, 4, ("reply_split",))
    assert found.asked.messages == (*said[:1], first.reply.message(), *said[3:])
    assert match(tree, *said, matcher=Matcher(allowed=("ids_changed",))) is None
    assert match(tree, user("a"), Message("assistant", "Other. "), *said[2:]) is None


def test_a_reply_that_its_limit_cut_and_the_rest_of_it_are_the_one_that_went_on_from_it() -> None:
    tree = TraceTree()
    add(tree, [user("a")], Reply("Let me"))
    whole = add(tree, [user("a")], Reply("Let me see."))
    parts = Message("assistant", "Let me"), Message("assistant", " see.")
    found = match(tree, user("a"), *parts, user("c"))
    assert found is not None
    assert (found.turn, found.num_known, found.accepted) == (whole.id, 2, ("reply_split",))
    assert found.asked.messages == (user("a"), whole.reply.message(), user("c"))


def test_of_equal_replies_the_one_is_meant_whose_call_comes_back_behind_what_broke_off() -> None:
    tree = TraceTree()
    turns = []
    for name in ("a" * 16, "b" * 16):
        reply = calling(ToolCall(call_id(name, 0), "f", "{}"), content="I call.")
        turn = replace(make_turn([1], [2], asked=[user("a")]), id=turn_id(name), reply=reply)
        tree.add(turn, None)
        turns.append(turn)
    for turn in turns:
        rest = Message("assistant", "call.", tool_calls=turn.reply.tool_calls)
        found = match(tree, user("a"), Message("assistant", "I "), rest, result("x", rest.tool_calls[0].id))
        assert found is not None
        assert (found.turn, found.accepted) == (turn.id, ("reply_split",))


@pytest.mark.parametrize("names", [("Bash", "bash"), ("bash", "Bash")])
def test_of_replies_that_differ_in_known_ways_the_one_is_meant_that_differs_least(names: tuple[str, str]) -> None:
    tree = TraceTree()
    turns = {name: add(tree, [user("a")], calling(ToolCall(f"call_{name}", name, "{}"))) for name in names}
    came = Message("assistant", tool_calls=(ToolCall("theirs", "bash", "{}"),))
    found = match(tree, user("a"), came, result("x", "theirs"))
    assert found is not None
    assert (found.turn, found.accepted) == (turns["bash"].id, ("ids_changed",))
