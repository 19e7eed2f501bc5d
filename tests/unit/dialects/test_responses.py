"""A request is read or refused by field; an answer is what OpenAI's own SDK reads, and comes back as one message."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from stenograph.dialects import responses
from stenograph.dialects.base import Answered, Writer
from stenograph.dialects.minted import Sealed, seal, unseal
from stenograph.errors import ContextOverflow, EngineError, RequestError
from stenograph.types import FinishReason, Message, Reply, ToolCall
from support.turns import make_turn

NAME, OTHER = "0123456789abcdef", "fedcba9876543210"
SHELL = {"type": "function", "name": "shell", "description": "run", "parameters": {"type": "object"}, "strict": False}
CLOSE = {"type": "function", "name": "close", "description": None, "parameters": None}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "others", "tools": [CLOSE]}
TOOLS = [SHELL, AGENTS, PATCH]


def parse(**body: Any) -> responses.ResponsesRequest:
    return responses.parse_request(json.dumps({"model": "m", "input": "hi", **body}).encode())


def read(*items: dict[str, Any]) -> tuple[Message, ...]:
    return parse(input=list(items)).conversation.messages


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


# --- reading items -----------------------------------------------------------------------------------------------


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
            [{**thought("a"), "id": "rs_00c5831fa9544977b2c2"}, {**text("b"), "id": "msg_d260e6079b2d4650923e"}],
            [Message("assistant", "b", "a")],  # another server's ids say nothing of turns
        ),
    ],
)
def test_where_a_turn_begins(items: list[dict[str, Any]], expected: list[Message]) -> None:
    assert list(read(*items)) == expected


def test_a_seal_of_ours_restores_reasoning_that_no_text_shows() -> None:
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": seal(NAME, "hm")}
    assert read(sealed, text("a")) == (Message("assistant", "a", "hm"),)
    assert read(sealed, *said(OTHER, text("a"))) == (Message("assistant", reasoning="hm"), Message("assistant", "a"))
    assert read({**sealed, **thought("shown")}, text("a")) == (Message("assistant", "a", "shown"),)
    raw = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "raw"}]}
    assert read(raw, text("a")) == (Message("assistant", "a", "raw"),)


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


# --- reading the rest --------------------------------------------------------------------------------------------


def test_tools_of_every_kind() -> None:
    request = parse(tools=[*TOOLS, {"type": "code_interpreter", "container": {"type": "auto"}}])
    names = [tool.name for tool in request.conversation.tools]
    assert names == ["shell", "agents__close", "patch"]
    patch = request.conversation.tools[2].parameters
    assert patch["required"] == ["input"]
    assert "start: X" in patch["properties"]["input"]["description"]
    assert request.notes == ("left_out:code_interpreter",)


def test_forbidden_tools_stay_out_of_the_prompt() -> None:
    assert parse(tools=TOOLS, tool_choice="none").conversation.tools == ()


def test_fields_of_a_request() -> None:
    request = parse(
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        stop="ignored",
        previous_response_id="resp_1",
        session_id="steno_1",
        parallel_tool_calls=False,
        truncation="auto",
        include=["reasoning.encrypted_content", "message.output_text.logprobs", "something.else"],
        text={"verbosity": "low", "format": {"type": "json_schema", "name": "n", "schema": {"type": "array"}}},
    )
    assert request.asked == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7}
    assert (request.previous, request.session) == ("resp_1", "steno_1")
    assert (request.encrypted, request.logprobs) == (True, True)
    assert request.notes == ("ignored:parallel_tool_calls", "ignored:truncation")
    assert request.grammar == {"type": "array"}
    assert parse(text={"format": {"type": "json_object"}}).grammar == {"type": "object"}
    assert parse(text={"format": {"type": "text"}}).grammar is None


def test_only_what_asks_for_it_goes_on_from_a_last_message() -> None:
    assert not parse(input=[text("a")]).conversation.continues
    assert parse(input=[text("a")], continue_final_message=True).conversation.continues
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
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
LEAVES |= st.sampled_from(WORDS + KINDS)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=10,
)


def objects(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


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
    type=likely("function", "custom", "namespace"),
    name=likely("f", "g"),
    description=VALUES,
    parameters=VALUES,
    format=objects(syntax=VALUES, definition=VALUES) | VALUES,
    tools=st.lists(INNER, max_size=2) | VALUES,
)
FIELDS = ("instructions", "temperature", "top_p", "max_output_tokens", "top_logprobs", "stream", "store", "include")
FIELDS += ("previous_response_id", "conversation", "background", "prompt", "truncation", "metadata", "reasoning")
FIELDS += ("session_id", "model", "continue_final_message", "parallel_tool_calls")
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
        json.loads(responses.error(e).body)
    else:
        json.loads(make_writer(request).whole([make_answered(Reply("x"))]))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"input": "\\ud800"}', b'{"input": "x", "user": %s}' % (b"[" * 5000)]
)
def test_what_is_no_request_at_all_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        responses.parse_request(body)


# --- writing -----------------------------------------------------------------------------------------------------


def make_answered(shown: Reply, finish_reason: FinishReason = "stop") -> Answered:
    turn = replace(make_turn([1, 2, 3], [4, 5]), id=f"turn_{NAME}", reply=shown, finish_reason=finish_reason)
    return Answered(turn, np.arange(3, dtype=np.int32), 1, shown)


def make_writer(request: responses.ResponsesRequest) -> Writer:
    return request.writer(NAME, 1_700_000_000, lambda ids: "".join(f"<{id}>" for id in ids))


def events_of(stream: bytes) -> list[dict[str, Any]]:
    events = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        events.append(event)
    return events


def sdk(body: bytes, content_type: str) -> OpenAI:
    """OpenAI's client, whose transport answers `body` to whatever it sends."""
    answer = httpx2.Response(200, headers={"content-type": content_type}, content=body)
    transport = httpx2.MockTransport(lambda request: answer)
    return OpenAI(
        api_key="x", base_url="http://gateway/v1", max_retries=0, http_client=httpx2.Client(transport=transport)
    )


def read_stream(stream: bytes) -> tuple[Response | None, list[Any]]:
    """The response where it is completed, and the events as the SDK gathers them."""
    with sdk(stream, "text/event-stream") as client, client.responses.stream(model="m", input="hi") as events:
        seen = list(events)
        return events.get_final_response() if seen[-1].type == "response.completed" else None, seen


def without_parsed(value: Any) -> Any:
    """`value` less what the SDK adds to it."""
    if isinstance(value, dict):
        return {key: without_parsed(one) for key, one in value.items() if key not in ("parsed", "parsed_arguments")}
    return [without_parsed(one) for one in value] if isinstance(value, list) else value


def read_whole(body: bytes) -> Response:
    with sdk(body, "application/json") as client:
        return client.responses.create(model="m", input="hi")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
REPLIED_CALLS = st.lists(
    st.builds(
        ToolCall,
        st.just("call_x"),
        st.sampled_from(["shell", "agents__close", "patch", "unknown"]),
        st.sampled_from(["{}", '{"a": 1}', '{"input":"é\\n"}', '{"cmd": "echo']) | TEXTS,
    ),
    max_size=3,
).map(lambda calls: [replace(one, id=f"call_{n}") for n, one in enumerate(calls)])
DELTAS = st.lists(st.tuples(st.booleans(), TEXTS), max_size=8)  # whether it is reasoning


def streamed(writer: Writer, deltas: list[tuple[bool, str]], answered: Answered) -> tuple[bytes, bytes]:
    """What leaves before the commit, and after it."""
    early = writer.begin(answered.num_prompt)
    for is_reasoning, piece in deltas:
        early += writer.delta(0, "" if is_reasoning else piece, piece if is_reasoning else "")
    return early, writer.end([answered])


def replied(deltas: list[tuple[bool, str]], calls: list[ToolCall]) -> Reply:
    content = "".join(piece for is_reasoning, piece in deltas if not is_reasoning)
    return Reply(content, "".join(piece for is_reasoning, piece in deltas if is_reasoning), tuple(calls))


@given(DELTAS, REPLIED_CALLS, st.booleans(), st.sampled_from(["stop", "length"]))
@settings(max_examples=60, deadline=None)
def test_the_sdk_reads_the_stream_as_it_reads_the_whole(
    deltas: list[tuple[bool, str]], calls: list[ToolCall], encrypted: bool, finish_reason: FinishReason
) -> None:
    in_order = sorted(deltas, key=lambda delta: not delta[0])
    answered = make_answered(replied(in_order, calls), finish_reason)
    include = ["reasoning.encrypted_content", "message.output_text.logprobs"] if encrypted else []
    request = parse(tools=TOOLS, include=include)
    early, late = streamed(make_writer(request), in_order, answered)
    expected = read_whole(make_writer(request).whole([answered])).to_dict()
    events = events_of(early + late)
    assert events[-1]["response"] == expected
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == expected["output"]
    response, seen = read_stream(early + late)
    if finish_reason == "stop":
        assert response is not None
        assert without_parsed(response.to_dict()) == expected
    snapshots = [event.snapshot for event in seen if event.type == "response.output_text.delta"]
    assert snapshots[-1:] == ([answered.shown.content] if answered.shown.content else [])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    adapter = TypeAdapter(ResponseStreamEvent)
    for event in events:
        assert adapter.validate_python(event).type == event["type"]


@given(DELTAS, REPLIED_CALLS)
@settings(max_examples=100, deadline=None)
def test_nothing_to_act_on_leaves_before_the_commit(deltas: list[tuple[bool, str]], calls: list[ToolCall]) -> None:
    answered = make_answered(replied(deltas, calls))
    early, late = streamed(make_writer(parse(tools=TOOLS)), deltas, answered)
    for event in events_of(early):
        assert "call" not in event["type"]
        assert event["type"] != "response.completed"
        assert event["type"] != "response.output_text.done"
        if event["type"].startswith("response.output_item"):
            assert event["item"]["type"] == "reasoning" or event["item"]["status"] == "in_progress"
    assert events_of(late)[-1]["type"] == "response.completed"
    deltas_seen = [one["delta"] for one in events_of(early) if one["type"] == "response.output_text.delta"]
    assert "".join(deltas_seen) == answered.shown.content


def sendable(output: list[dict[str, Any]], drop_ids: bool) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key != "id" or not drop_ids} for item in output]


@given(DELTAS, REPLIED_CALLS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_what_a_turn_wrote_comes_back_as_its_message(
    deltas: list[tuple[bool, str]], calls: list[ToolCall], drop_ids: bool
) -> None:
    calls = [one for one in calls if one.name != "patch"]  # a text for a custom tool is spelled anew
    answered = make_answered(replied(deltas, calls))
    body = json.loads(make_writer(parse(tools=TOOLS)).whole([answered]))
    assert read(*sendable(body["output"], drop_ids)) == (answered.shown.message(),)


@given(DELTAS, REPLIED_CALLS)
@settings(max_examples=60, deadline=None)
def test_reasoning_after_the_message_has_begun_comes_back_too(
    deltas: list[tuple[bool, str]], calls: list[ToolCall]
) -> None:
    calls = [one for one in calls if one.name != "patch"]
    answered = make_answered(replied(deltas, calls))
    early, late = streamed(make_writer(parse(tools=TOOLS)), deltas, answered)
    response, _ = read_stream(early + late)
    assert response is not None
    assert read(*without_parsed(response.to_dict())["output"]) == (answered.shown.message(),)


def test_the_order_of_events() -> None:
    answered = make_answered(Reply("hi", "hm", (ToolCall("call_1", "shell", "{}"),)))
    early, late = streamed(make_writer(parse(tools=TOOLS)), [(True, "hm"), (False, "hi")], answered)
    assert [event["type"].removeprefix("response.") for event in events_of(early)] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
    ]
    assert [event["type"].removeprefix("response.") for event in events_of(late)] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_calls_are_given_back_in_the_form_of_their_tools() -> None:
    calls = (
        ToolCall("call_0", "shell", '{ "cmd" :1}'),
        ToolCall("call_1", "agents__close", "{}"),
        ToolCall("call_2", "patch", '{"input": "*** é"}'),
        ToolCall("call_3", "patch", '{"patch": 1}'),
        ToolCall("call_4", "close", "{}"),
    )
    output = json.loads(make_writer(parse(tools=TOOLS)).whole([make_answered(Reply(tool_calls=calls))]))["output"]
    function = {"type": "function_call", "status": "completed"}
    custom = {"type": "custom_tool_call", "status": "completed", "name": "patch"}
    assert output == [
        {**function, "id": f"fc_{NAME}_0", "call_id": "call_0", "name": "shell", "arguments": '{ "cmd" :1}'},
        {
            **function,
            "id": f"fc_{NAME}_1",
            "call_id": "call_1",
            "namespace": "agents",
            "name": "close",
            "arguments": "{}",
        },
        {**custom, "id": f"ctc_{NAME}_2", "call_id": "call_2", "input": "*** é"},
        {**custom, "id": f"ctc_{NAME}_3", "call_id": "call_3", "input": '{"patch": 1}'},  # the way the model wrote it
        {**function, "id": f"fc_{NAME}_4", "call_id": "call_4", "name": "close", "arguments": "{}"},
    ]
    assert [one.name for one in read(*output)[0].tool_calls] == [one.name for one in calls]


def test_a_response_repeats_what_was_asked_and_counts_tokens() -> None:
    request = parse(tools=TOOLS, temperature=0.5, metadata={"a": "b"}, previous_response_id="resp_0", store=False)
    body = json.loads(make_writer(request).whole([make_answered(Reply("hi"))]))
    response = Response.model_validate(body, strict=True)
    assert (response.id, response.model, response.status) == (f"resp_{NAME}", "m", "completed")
    assert (body["tools"], body["temperature"], body["metadata"]) == (TOOLS, 0.5, {"a": "b"})
    assert (body["previous_response_id"], body["store"], body["created_at"]) == ("resp_0", False, 1_700_000_000)
    assert body["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 5,
    }


def test_what_is_included_on_request() -> None:
    answered = make_answered(Reply("hi", "hm"))
    include = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    reasoning, message = json.loads(make_writer(parse(include=include)).whole([answered]))["output"]
    sealed = unseal(reasoning["encrypted_content"])
    assert sealed == Sealed(NAME, "hm")
    assert [row["token"] for row in message["content"][0]["logprobs"]] == ["<4>", "<5>"]
    reasoning, message = json.loads(make_writer(parse()).whole([answered]))["output"]
    assert "encrypted_content" not in reasoning
    assert message["content"][0]["logprobs"] == []


def test_a_turn_cut_by_length_is_incomplete() -> None:
    answered = make_answered(Reply("hi"), "length")
    _, late = streamed(make_writer(parse()), [(False, "hi")], answered)
    last = events_of(late)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["status"] == last["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("begun", [True, False])
def test_a_failure_is_an_event_that_the_sdk_reads_and_nothing_completes(begun: bool) -> None:
    writer = make_writer(parse())
    stream = writer.begin(3) + writer.delta(0, "hi", "") if begun else b""
    stream += writer.failed(EngineError("the engine went away"))
    with sdk(stream, "text/event-stream") as client, client.responses.stream(model="m", input="hi") as events:
        last = list(events)[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "the engine went away")


def test_an_overflow_is_told_by_the_code_that_clients_know() -> None:
    told = responses.error(ContextOverflow(9, 8))
    assert (told.status, json.loads(told.body)["error"]["code"]) == (400, "context_length_exceeded")
    failed = events_of(make_writer(parse()).failed(ContextOverflow(9, 8)))[-1]
    assert failed["response"]["error"]["code"] == "context_length_exceeded"
