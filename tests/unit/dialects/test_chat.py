"""Whatever JSON comes in, the answer is a record or a RequestError that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.dialects import chat
from stenograph.dialects.base import Answered
from stenograph.errors import RequestError
from support.arbitrary import objects, values
from support.turns import make_turn

WORDS = (
    "type",
    "text",
    "function",
    "name",
    "arguments",
    "parameters",
    "tool_calls",
    "id",
    "role",
    "content",
    "refusal",
)
FIELDS = ("tool_choice", "stop", "n", "temperature", "top_k", "top_p", "max_tokens", "max_completion_tokens", "seed")
FIELDS += ("stream", "stream_options", "response_format", "logprobs", "top_logprobs", "session_id", "model")
VALUES = values(WORDS)
FUNCTIONS = objects(name=VALUES, arguments=VALUES, parameters=VALUES, description=VALUES) | VALUES
TOOLS = st.lists(objects(id=VALUES, type=st.just("function") | VALUES, function=FUNCTIONS), max_size=2) | VALUES
ROLES = st.sampled_from(["system", "user", "assistant", "tool"]) | VALUES
MESSAGES = st.lists(
    objects(role=ROLES, content=VALUES, tool_calls=TOOLS, name=VALUES, reasoning=VALUES, tool_call_id=VALUES),
    max_size=2,
)
BODIES = objects(messages=st.just([{"role": "user"}]) | MESSAGES | VALUES, tools=TOOLS, **dict.fromkeys(FIELDS, VALUES))


@given(BODIES | VALUES)
@settings(max_examples=400, deadline=None)
def test_any_json_is_read_or_refused(body: Any) -> None:
    try:
        assert chat.parse_request(json.dumps(body).encode()).conversation.messages
    except RequestError as e:
        told = json.loads(chat.error(e).body)
        assert told["error"]["message"]


DEEP = "[" * 500 + "]" * 500
REFUSED = {
    "function": '"tools": [{"type": "function", "function": "f"}]',
    "function.parameters": f'"tools": [{{"function": {{"name": "f", "parameters": {{"a": {DEEP}}}}}}}]',
    "stop": f'"stop": {DEEP}',
    "temperature": '"temperature": 1e400',
    "top_p": '"top_p": NaN',
    "top_k": '"top_k": 18446744073709551615',
    "seed": '"seed": ' + "9" * 400,
    "seed of an export": '"seed": 9223372036854775808',
    "surrogate": '"model": "\\ud800"',
    "depth": f'"metadata": {"[" * 5000}{"]" * 5000}',
}


@pytest.mark.parametrize("field", REFUSED.values(), ids=REFUSED)
def test_what_no_record_can_hold_is_refused(field: str) -> None:
    with pytest.raises(RequestError):
        chat.parse_request(b'{"messages": [{"role": "user", "content": "x"}], %s}' % field.encode())


def read(**fields: Any) -> chat.ChatRequest:
    return chat.parse_request(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "sub")]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (None, ["add", "sub"]),
        ("auto", ["add", "sub"]),
        ("none", []),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS[1:]}}, ["sub"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, []),
    ],
)
def test_tools_that_may_not_be_called_stay_out_of_the_prompt(choice: Any, names: list[str]) -> None:
    assert [tool.name for tool in read(tools=TOOLS, tool_choice=choice).conversation.tools] == names


ASKED_IN_VAIN: dict[str, dict[str, Any]] = {
    "tool_choice": {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": TOOLS}}},
    "functions": {"functions": [{"name": "add"}]},
    "modalities": {"modalities": ["text", "audio"]},
    "guided_json": {"guided_json": {"type": "object"}},
    "messages[0].function_call": {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
}


@pytest.mark.parametrize("param", ASKED_IN_VAIN)
def test_what_would_change_the_answer_is_never_dropped(param: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(**ASKED_IN_VAIN[param])
    assert refused.value.param == param


def test_what_breaks_nothing_is_noted() -> None:
    ignored = {"chat_template_kwargs": {"enable_thinking": False}, "logit_bias": {"5": 1}, "web_search_options": {}}
    notes = ("ignored:logit_bias", "ignored:chat_template_kwargs", "left_out:web_search")
    assert read(**ignored, functions=[], function_call=None, modalities=["text"]).notes == notes


def test_effort_that_is_not_made_is_noted() -> None:
    assert read(reasoning_effort="high", verbosity="low").notes == ("ignored:reasoning_effort", "ignored:verbosity")
    assert read(reasoning={"effort": "high"}).notes == ("ignored:reasoning.effort",)
    assert read(thinking={"type": "disabled"}).notes == ("ignored:thinking",)
    assert read(reasoning_effort=None, verbosity=None, thinking={"type": "enabled"}, reasoning="x").notes == ()


def test_a_refusal_is_what_an_assistant_said() -> None:
    said = [{"role": "assistant", "content": None, "refusal": "No.", "function_call": None}]
    assert read(messages=said).conversation.messages[0].content == "No."


def test_a_token_that_ends_inside_a_character_claims_no_bytes() -> None:
    request = chat.parse_request(b'{"messages": [{"role": "user", "content": "x"}], "logprobs": true}')
    texts = {1: "a", 2: "\ufffd"}
    turn = make_turn([0], [1, 2])
    writer = request.writer("id", 0, lambda ids: texts[int(ids[0])])
    choice = json.loads(writer.whole([Answered(turn, turn.context_ids, 0, turn.reply)]))["choices"][0]
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[97], None]


def test_an_error_that_quotes_no_text_is_still_json() -> None:
    body = chat.error(RequestError("unknown session \udcff")).body
    assert json.loads(body)["error"]["message"] == "unknown session \\udcff"
