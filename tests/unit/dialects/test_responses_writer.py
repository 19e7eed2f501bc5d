"""An answer is what OpenAI's own SDK reads, streamed or whole, and comes back as one message."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from stenograph.dialects import responses
from stenograph.dialects.base import Answered, Writer
from stenograph.dialects.minted import Sealed, unseal
from stenograph.errors import ContextOverflow, EngineError
from stenograph.types import FinishReason, Reply, ToolCall
from support.responses import NAME, TOOLS, make_answered, make_writer, parse, read


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
        ToolCall(f"call_{NAME}_0", "shell", '{ "cmd" :1}'),
        ToolCall(f"call_{NAME}_1", "agents__close", "{}"),
        ToolCall(f"call_{NAME}_2", "patch", '{"input": "*** é"}'),
        ToolCall(f"call_{NAME}_3", "patch", '{"patch": 1}'),
        ToolCall(f"call_{NAME}_4", "close", "{}"),
        ToolCall(f"call_{NAME}_5", "patch", '{"input": "x", "more": 1}'),
    )
    output = json.loads(make_writer(parse(tools=TOOLS)).whole([make_answered(Reply(tool_calls=calls))]))["output"]
    function = {"type": "function_call", "status": "completed"}
    custom = {"type": "custom_tool_call", "status": "completed", "name": "patch"}
    assert output == [
        {**function, "id": f"fc_{NAME}_0", "call_id": f"call_{NAME}_0", "name": "shell", "arguments": '{ "cmd" :1}'},
        {
            **function,
            "id": f"fc_{NAME}_1",
            "call_id": f"call_{NAME}_1",
            "namespace": "agents",
            "name": "close",
            "arguments": "{}",
        },
        {**custom, "id": f"ctc_{NAME}_2", "call_id": f"call_{NAME}_2", "input": "*** é"},
        {**custom, "id": f"ctc_{NAME}_3", "call_id": f"call_{NAME}_3_raw", "input": '{"patch": 1}'},
        {**function, "id": f"fc_{NAME}_4", "call_id": f"call_{NAME}_4", "name": "close", "arguments": "{}"},
        {**custom, "id": f"ctc_{NAME}_5", "call_id": f"call_{NAME}_5_raw", "input": '{"input": "x", "more": 1}'},
    ]
    result = {"type": "custom_tool_call_output", "call_id": f"call_{NAME}_3_raw", "output": "no"}
    said, told = read(*sendable(output, drop_ids=True), result)
    assert said.tool_calls == (*calls[:2], replace(calls[2], arguments='{"input":"*** é"}'), *calls[3:])
    assert told.tool_call_id == f"call_{NAME}_3"  # the mark that a call is told as it was written is ours alone


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
