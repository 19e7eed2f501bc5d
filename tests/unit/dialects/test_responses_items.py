"""What one turn wrote as several items is read back as one message, whichever client sends them."""

from __future__ import annotations

from typing import Any

import pytest

from stenograph.dialects.minted import seal
from stenograph.types import Message, ToolCall
from support.responses import AGENTS, NAME, OTHER, SHELL, parse, read


def said(turn: str, *items: dict[str, Any]) -> list[dict[str, Any]]:
    """Items with the ids that a turn of ours gives them."""
    prefixes = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
    return [{**item, "id": f"{prefixes[item['type']]}_{turn}"} for item in items]


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def text(content: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": content}]}


def call(call_id: str, name: str = "shell") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"}


def output(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "ok"}


def test_a_text_is_a_user_message_and_instructions_come_before_it() -> None:
    request = parse(instructions="be brief", input="hi")
    assert request.conversation.messages == (Message("system", "be brief"), Message("user", "hi"))
    assert (request.num_instructions, request.store, request.stream, request.previous) == (1, True, False, None)
    assert parse(instructions="").num_instructions == 0


def test_messages_with_and_without_a_type() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    messages = read(
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "system", "content": parts},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    )
    assert [(m.role, m.content) for m in messages] == [
        ("system", "d"),
        ("system", "ab"),
        ("user", "ab"),
        ("assistant", "no"),
    ]


CALLS = (ToolCall("a", "shell", "{}"), ToolCall("b", "shell", "{}"))
ONE = Message("assistant", "I look", "hm", CALLS)
RESULTS = (Message("tool", "ok", tool_call_id="a"), Message("tool", "ok", tool_call_id="b"))


def test_what_one_turn_wrote_is_one_message() -> None:
    items = [thought("hm"), text("I look"), call("a"), call("b")]
    assert read(*items, output("a"), output("b")) == (ONE, *RESULTS)
    assert read(*said(NAME, *items), output("a"), output("b")) == (ONE, *RESULTS)


def test_results_between_parallel_calls_do_not_tear_a_turn_apart() -> None:
    first, second = said(NAME, call("a"), call("b"))
    messages = read(*said(NAME, thought("hm"), text("I look")), first, output("a"), second, output("b"))
    assert messages == (ONE, *RESULTS)


def test_calls_one_after_the_other_are_turns_of_their_own() -> None:
    alone = [Message("assistant", tool_calls=(one,)) for one in CALLS]
    expected = (alone[0], RESULTS[0], alone[1], RESULTS[1])
    assert read(call("a"), output("a"), call("b"), output("b")) == expected
    assert read(*said(NAME, call("a")), output("a"), *said(OTHER, call("b")), output("b")) == expected


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([text("a"), text("b")], [Message("assistant", "a"), Message("assistant", "b")]),
        ([text("a"), thought("b")], [Message("assistant", "a"), Message("assistant", reasoning="b")]),
        ([call("a"), text("b")], [Message("assistant", tool_calls=CALLS[:1]), Message("assistant", "b")]),
        ([thought("a"), thought("b")], [Message("assistant", reasoning="ab")]),
        ([text("<think>a</think>"), text("b")], [Message("assistant", "<think>a</think>b")]),
        (
            [text("<think>a</think>b"), text("c")],
            [Message("assistant", "<think>a</think>b"), Message("assistant", "c")],
        ),
        ([text("<think>a</think>"), call("a")], [Message("assistant", "<think>a</think>", tool_calls=CALLS[:1])]),
        (
            [*said(NAME, text("a")), *said(OTHER, call("a"))],
            [Message("assistant", "a"), Message("assistant", tool_calls=CALLS[:1])],
        ),
        (
            [*said(NAME, thought("a")), *said(OTHER, text("b"))],
            [Message("assistant", reasoning="a"), Message("assistant", "b")],
        ),
        (said(NAME, text("a"), thought("b")), [Message("assistant", "a", "b")]),
        (
            [thought("r"), *said(NAME, text("a")), *said(OTHER, call("a"))],
            [Message("assistant", "a", "r"), Message("assistant", tool_calls=CALLS[:1])],
        ),
        (
            [{**thought("a"), "id": "rs_00c5831fa9544977b2c2"}, {**text("b"), "id": "msg_d260e6079b2d4650923e"}],
            [Message("assistant", "b", "a")],  # another server's ids say nothing of turns
        ),
    ],
)
def test_where_a_turn_begins(items: list[dict[str, Any]], expected: list[Message]) -> None:
    assert list(read(*items)) == expected


def test_ids_of_ours_name_the_turn_that_a_message_is_from() -> None:
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": seal(OTHER, "hm")}
    later, foreign = said(NAME, call("a")), {**text("b"), "id": "msg_elsewhere"}
    messages = read(text("a"), *later, output("a"), sealed, text("a"), output("a"), foreign)
    assert [message.turn for message in messages] == [f"turn_{NAME}", None, f"turn_{OTHER}", None, None]


def test_a_seal_of_ours_restores_reasoning_that_no_text_shows() -> None:
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": seal(NAME, "hm")}
    assert read(sealed, text("a")) == (Message("assistant", "a", "hm"),)
    assert read(sealed, *said(OTHER, text("a"))) == (Message("assistant", reasoning="hm"), Message("assistant", "a"))
    assert read({**sealed, **thought("shown")}, text("a")) == (Message("assistant", "a", "shown"),)
    raw = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "raw"}]}
    assert read(raw, text("a")) == (Message("assistant", "a", "raw"),)


def test_tools_that_an_item_adds_are_told_like_the_others() -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [AGENTS, {"type": "web_search"}]}
    request = parse(input=[{"role": "user", "content": "u"}, item], tools=[SHELL])
    assert [tool.name for tool in request.conversation.tools] == ["shell", "agents__close"]
    assert request.conversation.messages == (Message("user", "u"),)
    assert request.callees["agents__close"].namespace == "agents"
    assert request.notes == ("left_out:web_search",)


def test_items_that_nobody_here_can_tell_a_model_of_are_noted() -> None:
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "Zm9yZWlnbg=="}
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    request = parse(input=[foreign, search, search, text("a")], tools=[{"type": "web_search"}])
    assert request.conversation.messages == (Message("assistant", "a"),)
    assert request.notes == ("left_out:web_search", "left_out:reasoning", "left_out:web_search_call")


def test_calls_of_other_kinds() -> None:
    messages = read(
        {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": 'é "x"\n'},
        {"type": "custom_tool_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "local_shell_call", "call_id": "b", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "b", "output": "x"},
        {**call("c", "close"), "namespace": "agents"},
    )
    assert messages == (
        Message("assistant", tool_calls=(ToolCall("a", "patch", '{"input":"é \\"x\\"\\n"}'),)),
        Message("tool", "done", tool_call_id="a"),
        Message("assistant", tool_calls=(ToolCall("b", "local_shell", '{"type":"exec","command":["ls"]}'),)),
        Message("tool", "x", tool_call_id="b"),
        Message("assistant", tool_calls=(ToolCall("c", "agents__close", "{}"),)),
    )


# Cut from recorded traffic: Codex, opencode, Kimi, LangGraph and the SDK, as they send a turn back.
CODEX: dict[str, Any] = {
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a22a74",
    "client_metadata": {"turn_id": "01a22a74"},
    "tools": [SHELL, AGENTS, {"type": "web_search", "external_web_access": True}],
}
WRITTEN = {"annotations": [], "logprobs": [], "type": "output_text", "text": "\n\nI will "}
DONE = {"type": "function_call", "status": "completed", "name": "shell", "arguments": '{ "cmd" :"ls"\n}'}
ENCRYPTED = {"encrypted_content": "ZmFrZS1lbmNyeXB0ZWQ="}
RECORDED: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "codex": (
        [
            {"type": "message", "id": "msg_2190f442-fb4e", "role": "developer", "content": "d"},
            {"type": "message", "id": "msg_01a2", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {**thought("hm"), "id": "rs_00c5831fa9544977b2c2", "content": None, **ENCRYPTED},
            {**text(""), "status": "completed", "id": "msg_d260e6079b2d4650923e", "content": [WRITTEN]},
            {**DONE, "id": "fc_a12d10afbbba4cad8382", "call_id": "call_4c"},
            {"type": "function_call_output", "id": "fco_01a22a74-efbe", "call_id": "call_4c", "output": "x"},
        ],
        CODEX,
    ),
    "opencode": (
        [
            {"role": "system", "content": "d"},
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {**thought("hm"), **ENCRYPTED},
            {"role": "assistant", "content": [{"type": "output_text", "text": "\n\nI will "}]},
            {"type": "function_call", "call_id": "call_4c", "name": "shell", "arguments": '{ "cmd" :"ls"\n}'},
            {"type": "function_call_output", "call_id": "call_4c", "output": "x"},
        ],
        {"max_output_tokens": 32000, "store": False, "prompt_cache_key": "ses_dd", "tool_choice": "auto"},
    ),
    "kimi": (
        [
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {**thought("hm"), **ENCRYPTED},
            {"type": "message", "role": "assistant", "content": [WRITTEN]},
            {**DONE, "call_id": "call_4c"},
            {"type": "function_call_output", "call_id": "call_4c", "output": [{"type": "input_text", "text": "x"}]},
        ],
        {"instructions": "d", "store": False, "max_output_tokens": 262144},
    ),
    "langgraph": (
        [
            {"type": "message", "role": "system", "content": "d"},
            {"type": "message", "role": "user", "content": "u"},
            {**thought("hm"), "id": "rs_8c64275024e24812ac04", **ENCRYPTED},
            {**text("\n\nI will "), "id": "msg_0c905abc73884868a55f"},
            {**DONE, "id": "fc_893cef3c8fde454e81b9", "call_id": "call_4c"},
            {"type": "function_call_output", "output": "x", "call_id": "call_4c"},
        ],
        {},
    ),
}


@pytest.mark.parametrize("client", RECORDED)
def test_what_clients_send_back(client: str) -> None:
    items, rest = RECORDED[client]
    request = parse(input=items, stream=True, **rest)
    assert request.conversation.messages == (
        Message("system", "d"),
        Message("user", "u"),
        Message("assistant", "\n\nI will ", "hm", (ToolCall("call_4c", "shell", '{ "cmd" :"ls"\n}'),)),
        Message("tool", "x", tool_call_id="call_4c"),
    )
    assert request.asked.get("max_tokens") == rest.get("max_output_tokens")
    assert request.store is rest.get("store", True)
