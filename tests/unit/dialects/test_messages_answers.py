"""What goes out, a real client reads the same streamed or whole, and sends back unchanged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anthropic
import httpx2
import numpy as np
import pytest
from anthropic.types import Message as Told
from anthropic.types import OutputTokensDetails
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.dialects import messages
from stenograph.dialects.base import KEEP_ALIVE, Answered
from stenograph.dialects.messages import MessagesRequest
from stenograph.errors import EngineError
from stenograph.types import Message, Reply, ToolCall
from support.turns import make_turn

USER = {"role": "user", "content": "hi"}
STREAMED = messages.parse_request(json.dumps({"max_tokens": 9, "messages": [USER], "stream": True}).encode())
Deltas = Sequence[tuple[str, str]]


def answered(reply: Reply, **turn: Any) -> Answered:
    made = replace(make_turn([1, 2, 3], [4, 5]), reply=reply, **turn)
    return Answered(made, np.array([1, 2, 3], np.int32), 1, reply)


class Gateway:
    """Answers a real client with `one`, streamed as `deltas` where it asks for that; keeps what the client sent."""

    def __init__(self, one: Answered, deltas: Deltas = ()) -> None:
        self.one, self.deltas = one, deltas
        self.asked: list[MessagesRequest] = []
        self.client = anthropic.Anthropic(
            api_key="key",
            base_url="http://gateway",
            max_retries=0,
            http_client=httpx2.Client(transport=httpx2.MockTransport(self._answer)),
        )

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        asked = messages.parse_request(request.content)
        self.asked.append(asked)
        writer = asked.writer("ab", 0, lambda ids: "")
        if not asked.stream:
            return httpx2.Response(200, headers={"content-type": "application/json"}, content=writer.whole([self.one]))
        begun, deltas = writer.begin(3), [writer.delta(0, *delta) for delta in self.deltas]
        events = [begun, KEEP_ALIVE, *deltas, KEEP_ALIVE, writer.end([self.one])]
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=b"".join(events))

    def ask(self, *said: Any, stream: bool, hide: bool = False) -> Told:
        thinking: Any = {"type": "adaptive", "display": "omitted" if hide else "summarized"}
        asked: Any = {"model": "m", "max_tokens": 9, "messages": said or [USER], "thinking": thinking}
        if not stream:
            return self.client.messages.create(**asked)
        with self.client.messages.stream(**asked) as events:
            return events.get_final_message()

    def sent_back(self, message: Told) -> Message:
        """What `message` is in the record once the client has sent it back."""
        self.ask(USER, {"role": "assistant", "content": message.content}, USER, stream=False)
        return self.asked[-1].conversation.messages[1]


PLAIN = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | PLAIN,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(PLAIN, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.builds(json.dumps, st.dictionaries(PLAIN, JSON, max_size=3), indent=st.sampled_from([None, 1]))
CALLS = st.lists(st.tuples(st.sampled_from(["add", "é b"]), ARGUMENTS), max_size=3)
ENDINGS: list[dict[str, Any]] = [
    {},
    {"finish_reason": "length", "ended_by": "length"},
    {"stopped_by": "END", "ended_by": "stop"},
]


def respelled(message: Message) -> Message:
    """`message`, its arguments in one spelling."""
    calls = tuple(replace(call, arguments=json.dumps(json.loads(call.arguments))) for call in message.tool_calls)
    return replace(message, tool_calls=calls)


@given(st.lists(st.tuples(PLAIN, PLAIN), max_size=5), CALLS, st.sampled_from(ENDINGS), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_client_reads_the_same_either_way_and_sends_it_back(
    deltas: Deltas, calls: list[tuple[str, str]], ending: dict[str, Any], hide: bool
) -> None:
    named = tuple(ToolCall(f"call_ab_{n}", name, arguments) for n, (name, arguments) in enumerate(calls))
    reply = Reply("".join(said for said, _ in deltas), "".join(thought for _, thought in deltas), named)
    gateway = Gateway(answered(reply, **ending), deltas)
    with gateway.client:
        streamed, whole = gateway.ask(stream=True, hide=hide), gateway.ask(stream=False, hide=hide)
        for message in (streamed, whole):
            thought = "".join(block.thinking for block in message.content if block.type == "thinking")
            uses = [(block.id, block.name, block.input) for block in message.content if block.type == "tool_use"]
            assert thought == ("" if hide else reply.reasoning)
            assert "".join(block.text for block in message.content if block.type == "text") == reply.content
            assert uses == [(f"toolu_ab_{n}", name, json.loads(raw)) for n, (name, raw) in enumerate(calls)]
            assert respelled(gateway.sent_back(message)) == respelled(reply.message())
        for field in ("id", "model", "role", "type", "stop_reason", "stop_sequence", "usage"):
            assert getattr(streamed, field) == getattr(whole, field)


@pytest.mark.parametrize(
    ("reply", "turn", "reason", "sequence"),
    [
        (Reply("x"), {}, "end_turn", None),
        (Reply(), {}, "end_turn", None),
        (Reply("x", tool_calls=(ToolCall("call_ab_0", "add", "{}"),)), {}, "tool_use", None),
        (Reply("x"), {"finish_reason": "length"}, "max_tokens", None),
        (Reply("x"), {"stopped_by": "END"}, "stop_sequence", "END"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_why_it_ended_and_what_it_cost(
    reply: Reply, turn: dict[str, Any], reason: str, sequence: str | None, stream: bool
) -> None:
    gateway = Gateway(answered(reply, **turn), [(reply.content, "")])
    with gateway.client:
        message = gateway.ask(stream=stream)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    usage = message.usage
    assert (usage.input_tokens, usage.output_tokens, usage.cache_read_input_tokens) == (3, 2, 0)
    assert usage.output_tokens_details == OutputTokensDetails(thinking_tokens=1)


def test_nothing_that_a_client_may_act_on_leaves_before_the_end() -> None:
    call = ToolCall("call_ab_0", "add", '{"a": 1.0e0,  "b":2}')
    one = answered(Reply("One.Two.", "Hm.", (call,)))
    writer = STREAMED.writer("ab", 0, lambda ids: "")
    before = events(writer.begin(3) + writer.delta(0, "One.", "Hm.") + writer.delta(0, "Two.", ""))
    after = events(writer.end([one]))
    assert before[0]["message"]["usage"]["input_tokens"] == 3
    assert [event["type"].removeprefix("content_block_") for event in before] == [
        *("message_start", "start", "delta", "delta", "stop"),
        *("start", "delta", "delta"),
    ]
    assert [event["delta"]["type"] for event in before if "delta" in event] == [
        *("thinking_delta", "signature_delta", "text_delta", "text_delta"),
    ]
    kinds = ["stop", "start", "delta", "stop", "message_delta", "message_stop"]
    assert [event["type"].removeprefix("content_block_") for event in after] == kinds
    assert after[2]["delta"] == {"type": "input_json_delta", "partial_json": call.arguments}
    assert [event.get("index") for event in after] == [1, 2, 2, 2, None, None]


def events(wire: bytes) -> list[dict[str, Any]]:
    read_events = []
    for event in wire.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        read_events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {read_events[-1]['type']}"
    return read_events


DEEP = [f'{{"a": {"[" * depth}{"]" * depth}}}' for depth in (100, 250, 500)]  # what clients or we cannot write again
NO_OBJECTS = ["{not json", "", "[1]", "null", '"x"', "1e999", '{"_raw": "x"}', '{"a": NaN}', '{"a": "\\ud800"}', *DEEP]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("raw", NO_OBJECTS)
def test_arguments_that_are_no_object_come_back_as_they_were(raw: str, stream: bool) -> None:
    reply = Reply(tool_calls=(ToolCall("call_ab_0", "add", raw),))
    gateway = Gateway(answered(reply))
    with gateway.client:
        message = gateway.ask(stream=stream)
        assert [block.input for block in message.content if block.type == "tool_use"] == [{"_raw": raw}]
        assert gateway.sent_back(message) == reply.message()


def test_an_object_goes_out_in_the_models_spelling() -> None:
    raw = '{"n": 123456789012345678901234567890,  "n": 1.0e0}'
    body = STREAMED.writer("ab", 0, lambda ids: "").whole([answered(Reply(tool_calls=(ToolCall("x", "add", raw),)))])
    assert b'"input":' + raw.encode() in body


@pytest.mark.parametrize("place", ["first", "later"])
def test_a_failure_in_a_stream_is_raised_by_the_client(place: str) -> None:
    writer = STREAMED.writer("ab", 0, lambda ids: "")
    sent = writer.begin(3) + (writer.delta(0, "Some", "") if place == "later" else b"")
    sent += writer.failed(EngineError("the engine\nbroke"))
    headers = {"content-type": "text/event-stream"}
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, headers=headers, content=sent))
    with anthropic.Anthropic(
        api_key="key", base_url="http://gateway", max_retries=0, http_client=httpx2.Client(transport=transport)
    ) as client:
        stream = client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}])
        with pytest.raises(anthropic.APIStatusError, match="the engine"), stream as told_events:
            told_events.get_final_message()
