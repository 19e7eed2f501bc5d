"""A fork says where it parts from what is recorded, and why, as far as that can be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from stenograph.traces.drift import Drift
from stenograph.traces.equivalences import NAMES
from stenograph.traces.memory import MemoryTraceStore
from stenograph.traces.session import Opening
from stenograph.types import BranchRole, Conversation, Message, Reply, Tool, ToolCall, Turn
from support.turns import make_turn, user


class Recording:
    """A session that is asked as the gateway asks it; ids are made up, and kept wherever a match keeps them."""

    def __init__(self, *off: str) -> None:
        self.store = MemoryTraceStore([name for name in NAMES if name not in off])
        self.store.open(Opening("s"))
        self._next = 0

    def ask(
        self,
        messages: Sequence[Message],
        reply: Reply,
        *,
        tools: tuple[Tool, ...] = (),
        keep: bool = True,
        role: BranchRole = "main",
    ) -> Turn:
        match = self.store.match("s", Conversation(tuple(messages), tools))
        num_known = match.num_known if match is not None else 0
        context = [7, *self._ids(2)] if match is None or not keep else self._ids(2)
        turn = make_turn(context, self._ids(2), asked=messages[num_known:], tools=tools)
        turn = replace(turn, reply=reply, extends=match is not None and keep, role=role)
        self.store.commit("s", match.turn if match is not None else None, turn)
        return turn

    def drift(self) -> Drift:
        (drift,) = self.store.drift("s")
        return drift

    def _ids(self, n: int) -> list[int]:
        self._next += n
        return list(range(1000 + self._next, 1000 + self._next + n))


SYSTEM = Message("system", "Be brief.")


def reply(text: str, reasoning: str = "") -> Reply:
    return Reply(text, reasoning)


def said(text: str, reasoning: str = "") -> Message:
    return Message("assistant", text, reasoning)


def test_what_goes_on_is_no_fork() -> None:
    session = Recording()
    session.ask([SYSTEM, user("a")], reply("b", "why"))
    session.ask([SYSTEM, user("a"), said("b"), user("c")], reply("d"))
    assert session.store.drift("s") == []


def test_white_space_that_no_reply_follows() -> None:
    """It is accepted in what was answered before; what is to be answered is asked as it came."""
    session = Recording()
    session.ask([SYSTEM, user("a")], reply("b"))
    session.ask([SYSTEM, user("a\n")], reply("c"))
    drift = session.drift()
    assert (drift.cause, drift.message, drift.before, drift.after) == ("message_changed", 1, "a", "a\n")


def test_a_conversation_that_begins_otherwise_is_compared_with_one_that_begins_with_the_same_role() -> None:
    session = Recording()
    session.ask([user("a")], reply("b"))
    session.ask([SYSTEM, user("a")], reply("b"))
    session.ask([user("z")], reply("b"))
    drift = session.store.drift("s")[-1]
    assert (drift.cause, drift.field, drift.before, drift.after) == ("message_changed", "content", "a", "z")


def test_an_edited_reply() -> None:
    session = Recording()
    first = session.ask([SYSTEM, user("a")], reply("say it"))
    turn = session.ask([SYSTEM, user("a"), said("say this"), user("c")], reply("d"))
    drift = session.drift()
    assert (drift.turn, drift.parent_turn, drift.cause, drift.setting) == (turn.id, None, "message_changed", None)
    assert (drift.message, drift.role, drift.field, drift.char) == (2, "assistant", "content", 4)
    assert (drift.before, drift.after) == ("say it", "say this")
    assert drift.token == 1  # of the prompt, the first id is the same
    assert drift.rerendered == 2
    assert session.store.tree("s").path_ids(first.id)[0] == 7


def test_an_edited_question_goes_on_from_the_turn_before_it() -> None:
    session = Recording()
    first = session.ask([user("a")], reply("b"))
    session.ask([user("a"), said("b"), user("c")], reply("d"))
    session.ask([user("a"), said("b"), user("C")], reply("e"))
    drift = session.drift()
    assert (drift.parent_turn, drift.cause, drift.message, drift.char) == (first.id, "message_changed", 2, 0)
    assert drift.rerendered == 0  # nothing that was said before had to be


def test_reasoning_that_may_not_be_dropped() -> None:
    session = Recording("reasoning_dropped")
    session.ask([user("a")], reply("b", "why"))
    session.ask([user("a"), said("b"), user("c")], reply("d"))
    drift = session.drift()
    assert (drift.cause, drift.field, drift.setting) == (
        "reasoning_stripped",
        "reasoning",
        "matching.reasoning_dropped",
    )
    assert (drift.before, drift.after) == ("why", "")


def test_other_arguments() -> None:
    session = Recording()
    session.ask([user("a")], Reply("", "", (ToolCall("1", "f", '{"x": 1}'),)))
    called = Message("assistant", tool_calls=(ToolCall("1", "f", '{"x": 2}'),))
    session.ask([user("a"), called, Message("tool", "r", tool_call_id="1")], reply("d"))
    drift = session.drift()
    assert (drift.cause, drift.field, drift.char, drift.setting) == ("arguments_changed", "arguments", 6, None)


def test_arguments_that_may_not_be_respelled() -> None:
    session = Recording("arguments_respelled")
    session.ask([user("a")], Reply("", "", (ToolCall("1", "f", '{"x": 1}'),)))
    called = Message("assistant", tool_calls=(ToolCall("1", "f", '{"x":1}'),))
    session.ask([user("a"), called, Message("tool", "r", tool_call_id="1")], reply("d"))
    assert (session.drift().cause, session.drift().setting) == ("arguments_changed", "matching.arguments_respelled")


def test_a_message_that_was_put_in() -> None:
    session = Recording()
    session.ask([SYSTEM, user("a")], reply("b"))
    session.ask([SYSTEM, user("remember!"), user("a"), said("b"), user("c")], reply("d"))
    assert (session.drift().cause, session.drift().message) == ("message_inserted", 1)


def test_messages_that_were_left_out() -> None:
    session = Recording()
    session.ask([SYSTEM, user("a")], reply("b"))
    session.ask([SYSTEM, user("a"), said("b"), user("c")], reply("d"))
    session.ask([SYSTEM, user("c"), said("d"), user("e")], reply("f"))
    assert (session.drift().cause, session.drift().message) == ("history_truncated", 1)


def test_messages_that_were_left_out_before_a_reply_that_ids_name() -> None:
    session = Recording()
    call = ToolCall("call_0123456789abcdef_0", "f", "{}")
    session.ask([SYSTEM, user("a")], reply("b"))
    turn = replace(make_turn([9001], [9002], asked=[user("c")]), reply=Reply("", "", (call,)))
    turn = replace(turn, id="turn_0123456789abcdef")
    (first,) = session.store.tree("s").turns
    session.store.commit("s", first, turn)
    result = Message("tool", "r", tool_call_id=call.id)
    session.ask([SYSTEM, user("changed and shorter"), turn.reply.message(), result], reply("d"))
    assert session.drift().message == 1  # compared with the turn that was meant, and not with the last


def test_a_reply_that_came_back_cut_short() -> None:
    session = Recording()
    session.ask([user("a")], reply("a long reply"))
    session.ask([user("a"), said("a long"), user("go on")], reply("d"))
    assert (session.drift().cause, session.drift().char) == ("history_truncated", 6)


def test_a_conversation_that_goes_on_from_a_summary() -> None:
    session = Recording()
    summary = "The user asked for a, and the agent did b; what is left is c."
    session.ask([SYSTEM, user("a")], reply("b"))
    session.ask([SYSTEM, user("a"), said("b"), user("Summarize.")], reply(summary))
    session.ask([SYSTEM, user(f"This goes on from a summary:\n{summary}")], reply("c"))
    assert session.drift().cause == "compaction"


@pytest.mark.parametrize(("role", "cause"), [("compaction", "compaction"), ("main", "message_changed")])
def test_a_conversation_that_goes_on_from_a_summary_that_stays_a_reply(role: BranchRole, cause: str) -> None:
    session = Recording()
    summary = "The user asked for a, and the agent did b; what is left is c."
    session.ask([SYSTEM, user("a")], reply("b"))
    session.ask([SYSTEM, user("a"), said("b"), user("c")], reply("d"))
    session.ask([SYSTEM, user("a"), said("b"), user("c"), said("d"), user("Summarize.")], reply(summary), role=role)
    session.ask([SYSTEM, user("What did we do?"), said(summary), user("Go on.")], reply("e"))
    assert session.drift().cause == cause


def test_another_system_text() -> None:
    session = Recording()
    session.ask([SYSTEM, user("a")], reply("b"))
    session.ask([Message("system", "Be long."), user("a")], reply("c"))
    assert (session.drift().cause, session.drift().message, session.drift().char) == ("system_changed", 0, 3)


def test_other_tools() -> None:
    session = Recording()
    session.ask([SYSTEM, user("a")], reply("b"), tools=(Tool("f", "", {}),))
    session.ask([Message("system", "Name it."), user("x")], reply("title"))
    session.ask([SYSTEM, user("a"), said("b"), user("c")], reply("d"), tools=(Tool("f", "", {}), Tool("g", "", {})))
    first, second = session.store.drift("s")
    assert first.cause == "system_changed"
    assert (second.cause, second.message, second.field) == ("tools_changed", None, "tools")
    assert (second.before, second.after) == ("f", "f, g")


def test_a_template_that_rewrites_what_was_said() -> None:
    session = Recording()
    session.ask([user("a")], reply("b", "why"))
    parent = session.ask([user("a"), said("b", "why"), user("c")], reply("d", "because"))
    messages = [user("a"), said("b", "why"), user("c"), said("d", "because"), user("e")]
    session.ask(messages, reply("f"), keep=False)
    drift = session.drift()
    assert (drift.cause, drift.parent_turn) == ("template_rewrites_history", parent.id)
    assert (drift.message, drift.field, drift.setting) == (1, "reasoning", "model.thinking_retention")
    assert session.store.tree("s").said(drift.turn)[:-1] == tuple(messages)


def test_texts_are_cut_around_the_difference() -> None:
    session = Recording()
    session.ask([Message("system", "x" * 5000 + "a" * 5000), user("a")], reply("b"))
    session.ask([Message("system", "x" * 5000 + "b" * 5000), user("a")], reply("c"))
    drift = session.drift()
    assert drift.char == 5000
    assert drift.before is not None
    assert drift.before.startswith("x" * 40 + "a")
    assert len(drift.before) == 200


def test_siblings_are_no_forks() -> None:
    session = Recording()
    for _ in range(3):
        turn = make_turn([1, 2], [3], asked=[user("a")])
        session.store.commit("s", None, turn)
    assert session.store.drift("s") == []


HEADER = "x-billing-header: version=1.2.{};\nBe brief."


def test_a_difference_that_is_accepted_is_not_the_cause() -> None:
    session = Recording()
    session.ask([Message("system", HEADER.format("a")), user("a")], reply("b"))
    session.ask([Message("system", "Name it."), user("a")], reply("title"))
    session.ask([Message("system", HEADER.format("b")), user("another")], reply("c"))
    _, drift = session.store.drift("s")
    assert (drift.cause, drift.message, drift.before, drift.after) == ("message_changed", 1, "a", "another")


def test_of_a_message_with_several_differences_the_one_that_is_not_accepted_is_the_cause() -> None:
    session = Recording()
    session.ask([user("a")], Reply("text", "why", (ToolCall("1", "f", '{"x": 1}'),)))
    called = Message("assistant", "text\n", tool_calls=(ToolCall("mine", "f", '{"x":2}'),))
    session.ask([user("a"), called, Message("tool", "r", tool_call_id="mine")], reply("d"))
    drift = session.drift()
    assert (drift.cause, drift.field, drift.before, drift.after) == (
        "arguments_changed",
        "arguments",
        '{"x": 1}',
        '{"x":2}',
    )


def test_another_function_was_called() -> None:
    session = Recording()
    session.ask([user("a")], Reply("", "", (ToolCall("1", "f", "{}"),)))
    called = Message("assistant", tool_calls=(ToolCall("1", "g", "{}"),))
    session.ask([user("a"), called, Message("tool", "r", tool_call_id="1")], reply("d"))
    assert (session.drift().cause, session.drift().field) == ("message_changed", "name")


def test_every_setting_that_would_accept_it_is_named() -> None:
    session = Recording("reasoning_dropped", "ids_changed")
    session.ask([user("a")], Reply("", "why", (ToolCall("1", "f", "{}"),)))
    called = Message("assistant", tool_calls=(ToolCall("2", "f", "{}"),))
    session.ask([user("a"), called, Message("tool", "r", tool_call_id="2")], reply("d"))
    assert session.drift().setting == "matching.ids_changed, matching.reasoning_dropped"


def test_results_that_may_not_be_reordered() -> None:
    session = Recording("results_reordered")
    calls = (ToolCall("1", "f", "{}"), ToolCall("2", "f", "{}"))
    results = [Message("tool", name, tool_call_id=name) for name in ("1", "2")]
    said = [user("a"), Message("assistant", tool_calls=calls)]
    session.ask(said[:1], Reply("", "", calls))
    session.ask([*said, *results], reply("b"))
    session.ask([*said, *results[::-1], Message("assistant", "b"), user("c")], reply("d"))
    assert session.drift().setting == "matching.results_reordered"


def test_tools_of_the_same_names_show_what_differs() -> None:
    session = Recording()
    session.ask([user("a")], reply("b"), tools=(Tool("f", "does a", {}), Tool("g", "", {})))
    session.ask([user("a"), said("b"), user("c")], reply("d"), tools=(Tool("f", "does b", {}), Tool("g", "", {})))
    drift = session.drift()
    assert (drift.cause, drift.before, drift.after) == ("tools_changed", "f: does a {}", "f: does b {}")


def test_other_tools_beside_an_accepted_header() -> None:
    session = Recording()
    one, other = ((Tool(name, "", {}),) for name in ("f", "g"))
    session.ask([Message("system", HEADER.format("a")), user("a")], reply("b"), tools=one)
    session.ask([Message("system", "Name it."), user("x")], reply("title"), tools=one)
    session.ask([Message("system", HEADER.format("b")), user("c")], reply("d"), tools=other)
    assert [drift.cause for drift in session.store.drift("s")] == ["system_changed", "tools_changed"]
