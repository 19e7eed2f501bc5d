"""Whatever JSON comes in, the answer is a record or a RequestError that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.dialects import responses
from stenograph.dialects.minted import seal
from stenograph.errors import RequestError
from stenograph.types import Reply
from support.arbitrary import objects, values
from support.responses import NAME, OTHER, SHELL, TOOLS, make_answered, make_writer, parse


def test_tools_of_every_kind() -> None:
    request = parse(tools=[*TOOLS, {"type": "code_interpreter", "container": {"type": "auto"}}])
    names = [tool.name for tool in request.conversation.tools]
    assert names == ["shell", "agents__close", "patch"]
    patch = request.conversation.tools[2].parameters
    assert patch["required"] == ["input"]
    assert "start: X" in patch["properties"]["input"]["description"]
    assert request.notes == ("left_out:code_interpreter",)


OWN = ({"type": "local_shell"}, {"type": "shell"}, {"type": "shell", "environment": {"type": "local"}})
OWN += ({"type": "apply_patch"}, {"type": "computer"}, {"type": "computer_use_preview", "environment": "linux"})


@pytest.mark.parametrize("tool", OWN, ids=[f"{i}-{tool['type']}" for i, tool in enumerate(OWN)])
def test_a_clients_own_tool_that_the_model_does_not_know_is_refused(tool: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="declare it as a function") as refused:
        parse(tools=[*TOOLS, tool])
    assert refused.value.param == "tools[3].type"
    assert str(tool["type"]) in str(refused.value)


def test_a_shell_that_a_server_runs_is_left_out() -> None:
    request = parse(tools=[{"type": "shell", "environment": {"type": "container_auto"}}, SHELL])
    assert [tool.name for tool in request.conversation.tools] == ["shell"]
    assert request.notes == ("left_out:shell",)


def test_forbidden_tools_stay_out_of_the_prompt() -> None:
    assert parse(tools=TOOLS, tool_choice="none").conversation.tools == ()


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        ([{"type": "custom", "name": "patch"}, {"type": "mcp", "server_label": "x"}], ["patch"]),
        ([{"type": "function", "name": "close"}], ["agents__close"]),
        (
            [{"type": "function", "name": "agents__close"}, {"type": "function", "name": "shell"}],
            ["shell", "agents__close"],
        ),
        ([], []),
    ],
)
def test_tools_that_are_not_allowed_stay_out_of_the_prompt(allowed: list[dict[str, Any]], names: list[str]) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    assert [tool.name for tool in parse(tools=TOOLS, tool_choice=choice).conversation.tools] == names


def test_fields_of_a_request() -> None:
    request = parse(
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        stop="END",
        seed=3,
        top_k=-1,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        n=1,
        previous_response_id="resp_1",
        session_id="steno_1",
        parallel_tool_calls=False,
        truncation="auto",
        context_management=[{"type": "compaction", "compact_threshold": 5000}],
        include=["reasoning.encrypted_content", "message.output_text.logprobs", "something.else"],
        text={"verbosity": "low", "format": {"type": "json_schema", "name": "n", "schema": {"type": "array"}}},
    )
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1}
    values = {"temperature": 0.5, "top_p": 0.9, "top_k": 0, "min_p": 0.1, "max_tokens": 7, "seed": 3, "stop": ("END",)}
    assert request.asked == values | penalties
    assert (request.previous, request.session) == ("resp_1", "steno_1")
    assert (request.encrypted, request.logprobs) == (True, True)
    ignored = ("parallel_tool_calls", "context_management", "text.verbosity", "truncation")
    assert request.notes == tuple(f"ignored:{name}" for name in ignored)
    assert request.grammar == {"type": "array"}
    assert parse(text={"format": {"type": "json_object"}}).grammar == {"type": "object"}
    assert parse(text={"format": {"type": "text"}}).grammar is None


def test_effort_that_is_not_made_is_noted() -> None:
    request = parse(reasoning={"effort": "high", "summary": "auto"}, max_tool_calls=3, logit_bias={"5": 1})
    assert request.notes == ("ignored:logit_bias", "ignored:max_tool_calls", "ignored:reasoning.effort")
    assert parse(reasoning={"effort": None, "summary": "auto"}, max_tool_calls=None, text={}).notes == ()


SAID = {"role": "assistant", "content": "a"}


def test_only_what_asks_for_it_goes_on_from_a_last_message() -> None:
    assert not parse(input=[SAID]).conversation.continues
    assert parse(input=[SAID], continue_final_message=True).conversation.continues
    assert parse(input=[], continue_final_message=True, previous_response_id="resp_1").conversation.continues


REFUSED: dict[str, dict[str, Any]] = {
    "input": {"input": []},
    "input[0]": {"input": [{"type": "item_reference", "id": "msg_1"}]},
    "input[1].type": {"input": [{"role": "user"}, {}]},
    "input[0].role": {"input": [{"role": "tool", "content": "x"}]},
    "input[0].content[1].type": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "input_image"}]}]
    },
    "input[0].output[0].type": {"input": [{"type": "function_call_output", "output": [{"type": "input_file"}]}]},
    "input[0].name": {"input": [{"type": "function_call", "call_id": "x"}]},
    "input[0].summary[0].text": {"input": [{"type": "reasoning", "summary": [{"text": 5}]}]},
    "tools[0].name": {"tools": [{"type": "function"}]},
    "tools[0].tools[0].name": {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
    "tools[1].name": {"tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "f"}]},
    "tool_choice": {"tool_choice": {"type": "function", "name": "f"}},
    "tool_choice.tools": {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": 5}},
    "input[0].type": {"input": [{"type": "computer_call_output", "call_id": "c", "output": {}}]},
    "n": {"n": 2},
    "stop": {"stop": [""]},
    "seed": {"seed": "x"},
    "min_p": {"min_p": 2},
    "guided_json": {"guided_json": {"type": "object"}},
    "top_logprobs": {"top_logprobs": 2},
    "conversation": {"conversation": "conv_1"},
    "background": {"background": True},
    "prompt": {"prompt": {"id": "pmpt_1"}},
    "text.format.type": {"text": {"format": {"type": "xml"}}},
    "text.format.schema": {"text": {"format": {"type": "json_schema", "name": "n"}}},
    "max_output_tokens": {"max_output_tokens": 0},
    "previous_response_id": {"previous_response_id": 5},
    "continue_final_message": {"continue_final_message": True},
    "metadata": {"metadata": json.loads("[" * 400 + "]" * 400)},
    "input[0].action": {
        "input": [{"type": "local_shell_call", "action": {"a": json.loads("[" * 400 + "]" * 400)}}],
    },
}


@pytest.mark.parametrize("param", REFUSED)
def test_a_refusal_names_the_field(param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(**REFUSED[param])
    assert refused.value.param == param
    told = responses.error(refused.value)
    assert told.status == 400
    assert json.loads(told.body)["error"]["param"] == param


WORDS = ("type", "text", "name", "arguments", "id", "role", "content", "refusal", "summary", "output", "input_text")
KINDS = ("message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "local_shell_call")
KINDS += ("item_reference", "web_search_call", "namespace", "function", "custom", "web_search", "json_schema")
VALUES = values(WORDS, KINDS)


def likely(*words: str) -> st.SearchStrategy[Any]:
    return st.sampled_from(words) | VALUES


PARTS = st.lists(objects(type=likely("input_text", "output_text", "refusal"), text=likely("x"), refusal=VALUES))
ITEMS = objects(
    type=likely(*KINDS),
    role=likely("user", "assistant", "developer"),
    id=likely(f"msg_{NAME}", f"fc_{NAME}_1", f"rs_{OTHER}"),
    content=PARTS | VALUES,
    summary=PARTS | VALUES,
    output=PARTS | VALUES,
    encrypted_content=likely(seal(NAME, "hm")),
    name=likely("f"),
    namespace=VALUES,
    call_id=VALUES,
    arguments=likely("{}"),
    input=likely("x"),
    action=VALUES,
)
INNER = objects(type=likely("function", "custom"), name=likely("f"), description=VALUES, parameters=VALUES)
FUZZED_TOOLS = objects(
    type=likely("function", "custom", "namespace", "shell"),
    environment=VALUES,
    name=likely("f", "g"),
    description=VALUES,
    parameters=VALUES,
    format=objects(syntax=VALUES, definition=VALUES) | VALUES,
    tools=st.lists(INNER, max_size=2) | VALUES,
)
FIELDS = ("instructions", "temperature", "top_p", "max_output_tokens", "top_logprobs", "stream", "store", "include")
FIELDS += ("previous_response_id", "conversation", "background", "prompt", "truncation", "metadata", "reasoning")
FIELDS += (
    "stop",
    "seed",
    "n",
    "top_k",
    "max_tool_calls",
    "session_id",
    "model",
    "continue_final_message",
    "parallel_tool_calls",
)
BODIES = objects(
    input=st.just("x") | st.lists(ITEMS, max_size=4) | VALUES,
    tools=st.lists(FUZZED_TOOLS, max_size=2) | VALUES,
    tool_choice=likely("auto", "none"),
    text=objects(format=objects(type=likely("text", "json_object", "json_schema"), schema=VALUES)) | VALUES,
    **dict.fromkeys(FIELDS, VALUES),
)


@given(BODIES | VALUES)
@settings(max_examples=400, deadline=None)
def test_any_json_is_read_or_refused(body: Any) -> None:
    try:
        request = responses.parse_request(json.dumps(body).encode())
    except RequestError as e:
        told = json.loads(responses.error(e).body)
        assert told["error"]["message"]
    else:
        assert json.loads(make_writer(request).whole([make_answered(Reply("x"))]))["status"] == "completed"


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"input": "\\ud800"}', b'{"input": "x", "user": %s}' % (b"[" * 5000)]
)
def test_what_is_no_request_at_all_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        responses.parse_request(body)
