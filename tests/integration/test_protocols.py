"""The same promises in each protocol: what a client may act on comes after the commit, and errors in its own form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from stenograph.engines.scripted import Line, ScriptedEngine
from stenograph.traces.memory import MemoryTraceStore
from stenograph.types import Reply, ToolCall, Turn
from support.listening import listening, rendering, say

RENDERING = rendering()
CALLING = Line(RENDERING.encode_reply(Reply("Let me see.", "A tool.", (ToolCall("", "add", '{"a": 1}'),))))
SAYING = say(RENDERING, "It is five.")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@dataclass(frozen=True)
class Protocol:
    path: str
    ask: Callable[..., dict[str, Any]]
    acted_on: tuple[bytes, ...]  # what a client acts on, in a stream
    failed: bytes  # how a stream says an error
    last: bytes  # how a stream ends well
    error: Callable[[Any], Any]  # message of an error body


def chat_ask(text: str, **fields: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    return {"model": "m", "messages": [{"role": "user", "content": text}], "tools": tools, **fields}


def messages_ask(text: str, **fields: Any) -> dict[str, Any]:
    tools = [{"name": "add", "input_schema": SCHEMA}]
    return {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": text}], "tools": tools, **fields}


def responses_ask(text: str, **fields: Any) -> dict[str, Any]:
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA}]
    return {"model": "m", "input": [{"role": "user", "content": text}], "tools": tools, **fields}


PROTOCOLS = {
    "chat": Protocol(
        "/v1/chat/completions",
        chat_ask,
        (b'"tool_calls"', b'"finish_reason":"', b"[DONE]"),
        b'data: {"error":',
        b"data: [DONE]\n\n",
        lambda body: body["error"]["message"],
    ),
    "messages": Protocol(
        "/v1/messages",
        messages_ask,
        (b'"tool_use"', b"message_delta", b"message_stop"),
        b"event: error\n",
        b'"type":"message_stop"}\n\n',
        lambda body: body["error"]["message"] if body["type"] == "error" else None,
    ),
    "responses": Protocol(
        "/v1/responses",
        responses_ask,
        (b"function_call_arguments.done", b'"function_call"', b"response.completed"),
        b"event: response.failed\n",
        b"",
        lambda body: body["error"]["message"],
    ),
}


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> Protocol:
    return PROTOCOLS[request.param]


def encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def said(raw: bytes) -> str:
    """The pieces of a stream's text, in whichever protocol."""
    text = ""
    for line in raw.split(b"\n"):
        event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
        if event.get("choices"):
            text += event["choices"][0]["delta"].get("content") or ""
        elif event.get("type") == "content_block_delta":
            text += event["delta"].get("text", "")
        elif event.get("type") == "response.output_text.delta":
            text += event["delta"]
    return text


class Full(MemoryTraceStore):
    def commit(self, session: str, parent: str | None, *turns: Turn) -> None:
        raise OSError("no space left on device")


async def test_what_a_client_acts_on_comes_after_the_commit(protocol: Protocol) -> None:
    async with listening([CALLING]) as client:
        session = await client.open()
        raw = await session.raw(encoded(protocol.ask("hello", stream=True)), protocol.path)
        assert all(mark in raw for mark in protocol.acted_on)
        assert raw.endswith(b"0\r\n\r\n")
    async with listening([CALLING], Full()) as client:
        session = await client.open()
        raw = await session.raw(encoded(protocol.ask("hello", stream=True)), protocol.path)
        assert "Let me see." in said(raw)
        assert [mark for mark in protocol.acted_on if mark in raw] == []
        assert protocol.failed in raw
        assert b"no space left" in raw
        assert not raw.endswith(b"0\r\n\r\n")
        raw = await session.raw(encoded(protocol.ask("hello")), protocol.path)
        assert b"script exhausted" in raw


@pytest.mark.parametrize("fault", ["cut", "counts"])
async def test_an_engine_that_breaks_off_never_ends_a_stream_well(protocol: Protocol, fault: str) -> None:
    async with listening([say(RENDERING, "half of this is said", fault=fault)]) as client:
        session = await client.open()
        raw = await session.raw(encoded(protocol.ask("hello", stream=True)), protocol.path)
        assert said(raw).startswith("half")
        assert protocol.failed in raw
        assert [mark for mark in protocol.acted_on if mark in raw] == []
        assert not raw.endswith(b"0\r\n\r\n")
        assert await session.turns() == []
        assert set((await session.ledger())["dropped"]) == {"engine_failed"}


ERRORS = [("error", 502), ("refuse", 503), ("garbage", 502), ("overflow", 400)]


@pytest.mark.parametrize(("fault", "expected"), ERRORS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_is_a_status(
    protocol: Protocol, fault: str, expected: int, stream: bool
) -> None:
    async with listening([Line(SAYING.ids, fault=fault)]) as client:
        session = await client.open()
        status, headers, body = await session.ask(encoded(protocol.ask("hello", stream=stream)), protocol.path)
        told = protocol.error(json.loads(body))
        assert (status, headers["content-type"]) == (expected, "application/json")
        if fault == "overflow":
            assert ("prompt is too long: " if protocol.path == "/v1/messages" else "maximum context length is") in told
        else:
            assert "scripted fault" in told


async def test_what_a_retry_cannot_mend_says_so(protocol: Protocol) -> None:
    async with listening([SAYING]) as client:
        session = await client.open()
        await client.json("POST", f"/sessions/{session.id}/seal", {})
        status, headers, body = await session.ask(encoded(protocol.ask("hello")), protocol.path)
        assert (status, headers["x-should-retry"]) == (409, "false")
        assert "sealed" in protocol.error(json.loads(body))


async def test_a_body_that_is_no_request_is_a_400(protocol: Protocol) -> None:
    async with listening([SAYING]) as client:
        session = await client.open()
        for body in (b"", b"[]", b"{}", b'{"messages": 3, "input": 3}', b"\xff"):
            status, _, answer = await session.ask(body, protocol.path)
            assert status == 400
            assert protocol.error(json.loads(answer))


async def test_the_largest_body_is_read_and_one_larger_is_refused(protocol: Protocol) -> None:
    size = 64 * 2**20
    async with listening(ScriptedEngine([SAYING], context_length=100_000)) as client:
        session = await client.open()
        empty = encoded(protocol.ask(""))
        place = empty.index(b'"content": ""') + len(b'"content": "')
        largest = empty[:place] + b"word " * ((size - len(empty)) // 5) + empty[place:]
        largest += b" " * (size - len(largest))
        status, _, body = await session.ask(largest, protocol.path)
        told = protocol.error(json.loads(body))
        assert (status, "100000" in told) == (400, True)
        status, _, body = await session.ask(largest + b" ", protocol.path)
        assert (status, "max_body_bytes" in protocol.error(json.loads(body))) == (413, True)
        status, _, _ = await session.ask(encoded(protocol.ask("hello")), protocol.path)
        assert status == 200


IMAGES = {
    "chat": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    "responses": {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
}


@pytest.mark.parametrize("name", PROTOCOLS)
async def test_images_are_refused_by_name(name: str) -> None:
    protocol = PROTOCOLS[name]
    body = protocol.ask("hello")
    (body.get("messages") or body.get("input"))[0]["content"] = [IMAGES[name]]  # type: ignore[index]
    async with listening([SAYING]) as client:
        session = await client.open()
        status, _, answer = await session.ask(encoded(body), protocol.path)
        assert (status, "image" in protocol.error(json.loads(answer))) == (400, True)


async def test_a_stream_that_has_nothing_to_say_is_kept_alive(protocol: Protocol) -> None:
    async with listening([Line(SAYING.ids, fault="slow:0.3")], keep_alive_s=0.05) as client:
        session = await client.open()
        raw = await session.raw(encoded(protocol.ask("hello", stream=True)), protocol.path)
        assert raw.count(b": keep-alive") >= 2
        assert protocol.last in raw
        assert raw.endswith(b"0\r\n\r\n")


async def test_a_repeat_is_known_in_any_protocol_and_form(protocol: Protocol) -> None:
    """The repeat asks for another form of answer, and with other numbers: it asks the same all the same."""
    slow = say(RENDERING, "a slow answer", fault="pace:0.02")
    async with listening([slow, SAYING]) as client:
        session = await client.open()
        reader, writer = await session.connect(encoded(protocol.ask("hello", stream=True)), protocol.path)
        await asyncio.wait_for(reader.readuntil(b'"w"'), 20)
        writer.close()
        await session.until("undelivered")
        field = {"/v1/responses": "max_output_tokens"}.get(protocol.path, "max_tokens")
        repeat = encoded(protocol.ask("hello", stream=False, **{field: 250}))
        status, _, body = await session.ask(repeat, protocol.path)
        assert (status, b"a slow answer" in body) == (200, True)
        await session.until("delivered")


# --- what one protocol alone has ---------------------------------------------------------------------------------


async def test_a_prefill_is_continued_and_comes_back_as_one_text() -> None:
    said = Line(RENDERING.encode_text(" is five.<|im_end|>"))
    async with listening([said, SAYING]) as client:
        session = await client.open()
        begun = {"role": "assistant", "content": "The answer"}
        asked = messages_ask("what is 2 + 3?")
        asked["messages"].append(begun)
        status, _, body = await session.ask(encoded(asked), "/v1/messages")
        answer = json.loads(body)
        assert (status, answer["content"]) == (200, [{"type": "text", "text": " is five."}])
        _, _, counted = await session.ask(encoded(asked), "/v1/messages/count_tokens")
        assert json.loads(counted)["input_tokens"] == answer["usage"]["input_tokens"]

        asked["messages"][-1] = {"role": "assistant", "content": "The answer is five."}
        asked["messages"].append({"role": "user", "content": "sure?"})
        status, _, body = await session.ask(encoded(asked), "/v1/messages")
        assert status == 200
        assert await client.json("GET", f"/sessions/{session.id}/drift") == []
        tree = await client.json("GET", f"/sessions/{session.id}/tree?ids=1")
        assert [node["kind"] for node in tree["nodes"]] == ["context", "output", "context", "output"]
        text = RENDERING.decode(_ids([id for node in tree["nodes"] for id in node["ids"]]))
        assert "The answer is five.<|im_end|>\n<|im_start|>user\nsure?" in text
        (sample,) = await client.json("GET", f"/sessions/{session.id}/samples")
        trained = [id for id, mask in zip(sample["ids"], sample["loss_mask"], strict=True) if mask]
        assert trained == [*said.ids.tolist(), *SAYING.ids.tolist()]


async def test_a_reply_without_a_question_cannot_be_gone_on_with() -> None:
    async with listening([SAYING]) as client:
        session = await client.open()
        asked = messages_ask("hello") | {"messages": [{"role": "assistant", "content": "The answer"}]}
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            status, _, body = await session.ask(encoded(asked), path)
            told = json.loads(body)["error"]["message"]
            assert (status, "nothing stands before the reply" in told) == (400, True)


async def test_an_answer_has_its_requests_id_by_which_sdks_tell_of_it(protocol: Protocol) -> None:
    async with listening([SAYING, SAYING]) as client:
        session = await client.open()
        ids = set()
        for stream in (True, False):
            status, headers, _ = await session.ask(encoded(protocol.ask("hello", stream=stream)), protocol.path)
            assert (status, headers["x-request-id"]) == (200, headers["request-id"])
            ids.add(headers["request-id"])
        assert len(ids) == 2


async def test_a_stop_sequence_is_named_and_its_text_kept_back() -> None:
    said = say(RENDERING, "one END two")
    async with listening([said, SAYING]) as client:
        session = await client.open()
        body = encoded(messages_ask("count", stop_sequences=["END"], stream=True))
        _, _, raw = await session.ask(body, "/v1/messages")
        assert b'"stop_reason":"stop_sequence","stop_sequence":"END"' in raw
        assert b"two" not in raw
        (turn,) = await session.turns()
        assert turn["finish_reason"] == "stop"


async def test_a_stop_string_and_a_seed_hold_in_each_protocol(protocol: Protocol) -> None:
    store = MemoryTraceStore()
    async with listening([say(RENDERING, "one END two")], store) as client:
        session = await client.open()
        stop = "stop_sequences" if protocol.path == "/v1/messages" else "stop"
        body = encoded(protocol.ask("count", **{stop: ["END"]}, seed=7, stream=True))
        _, _, raw = await session.ask(body, protocol.path)
        assert said(raw) == "one "
        (turn,) = store.tree(session.id).turns.values()
        assert (turn.stopped_by, turn.ended_by, turn.sampling.stop, turn.sampling.seed) == ("END", "stop", ("END",), 7)


async def test_a_call_spelled_anew_by_the_protocol_goes_on_with_its_branch() -> None:
    async with listening([CALLING, SAYING]) as client:
        session = await client.open()
        asked = messages_ask("hello")
        _, _, body = await session.ask(encoded(asked), "/v1/messages")
        content = json.loads(body)["content"]
        assert content[-1]["input"] == {"a": 1}
        result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "done"}
        asked["messages"] += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        status, _, _ = await session.ask(encoded(asked), "/v1/messages")
        assert status == 200
        assert await client.json("GET", f"/sessions/{session.id}/drift") == []
        kinds = [node["kind"] for node in (await client.json("GET", f"/sessions/{session.id}/tree"))["nodes"]]
        assert kinds == ["context", "output", "context", "output"]


@pytest.mark.parametrize("traced", [True, False])
async def test_a_response_goes_on_from_the_one_it_names(traced: bool) -> None:
    async with listening([say(RENDERING, "Uno."), say(RENDERING, "Due."), say(RENDERING, "Tre.")]) as client:
        session = await client.open(traced=traced)
        ids = []
        for text in ("Alpha.", "Beta."):
            asked = responses_ask(text, instructions="Be brief.", **({"previous_response_id": ids[-1]} if ids else {}))
            status, _, body = await session.ask(encoded(asked), "/v1/responses")
            assert status == 200
            ids.append(json.loads(body)["id"])
        if traced:
            assert await client.json("GET", f"/sessions/{session.id}/drift") == []
            tree = await client.json("GET", f"/sessions/{session.id}/tree?ids=1")
            text = RENDERING.decode(_ids([id for node in tree["nodes"] for id in node["ids"]]))
            assert text.count("Be brief.") == 1  # instructions are said anew by each request, not piled up
            assert text.index("Alpha.") < text.index("Uno.") < text.index("Beta.") < text.index("Due.")
        other = await client.open()
        for where, unknown in ((session, "resp_unknown"), (other, ids[-1])):
            status, _, body = await where.ask(
                encoded(responses_ask("x", previous_response_id=unknown)), "/v1/responses"
            )
            assert (status, json.loads(body)["error"]["code"]) == (400, "previous_response_not_found")
        kept = encoded(responses_ask("third", store=False))
        _, _, body = await session.ask(kept, "/v1/responses")
        unkept = encoded(responses_ask("x", previous_response_id=json.loads(body)["id"]))
        assert (await session.ask(unkept, "/v1/responses"))[0] == 400


async def test_items_sent_by_their_ids_alone_are_found() -> None:
    async with listening([CALLING, SAYING]) as client:
        session = await client.open()
        asked = responses_ask("hello")
        _, _, body = await session.ask(encoded(asked), "/v1/responses")
        output = json.loads(body)["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        asked["input"] += [{"type": "item_reference", "id": item["id"]} for item in output]
        asked["input"].append({"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "done"})
        status, _, _ = await session.ask(encoded(asked), "/v1/responses")
        assert status == 200
        kinds = [node["kind"] for node in (await client.json("GET", f"/sessions/{session.id}/tree"))["nodes"]]
        assert kinds == ["context", "output", "context", "output"]
        asked["input"] = [{"type": "item_reference", "id": "msg_0123456789abcdef"}]
        status, _, body = await session.ask(encoded(asked), "/v1/responses")
        assert (status, json.loads(body)["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("arguments", ['{"input": "+ é"}', '{"other": 1}', '"+ é"', '{"input": "{}", "more": 1}'])
async def test_a_custom_tools_call_goes_on_with_its_branch(arguments: str, stream: bool) -> None:
    call = Line(RENDERING.encode_reply(Reply(tool_calls=(ToolCall("", "patch", arguments),))))
    async with listening([call, SAYING]) as client:
        session = await client.open()
        asked = responses_ask("hello", stream=stream, tools=[{"type": "custom", "name": "patch"}])
        _, _, body = await session.ask(encoded(asked), "/v1/responses")
        last = body.rstrip().rpartition(b"data: ")[2] if stream else body
        (item,) = json.loads(last)["response"]["output"] if stream else json.loads(last)["output"]
        assert item["input"] == ("+ é" if arguments == '{"input": "+ é"}' else arguments)
        result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
        asked["input"] += [{key: value for key, value in item.items() if key != "id"}, result]
        status, _, _ = await session.ask(encoded(asked), "/v1/responses")
        assert (status, await client.json("GET", f"/sessions/{session.id}/drift")) == (200, [])


async def test_what_counts_tokens_or_comes_later_keeps_its_protocols_errors() -> None:
    async with listening([SAYING]) as client:
        session = await client.open()
        for path in ("/v1/messages/count_tokens", "/v1/messages/batches", "/v1/messages/of/the/future"):
            _, _, body = await session.ask(b"{", path)
            assert json.loads(body)["type"] == "error"
        assert await session.turns() == []
        status, _, _ = await session.ask(encoded(messages_ask("hello")), "/v1/messages?beta=true&x=1")
        assert status == 200
        await session.until("delivered")


def _ids(ids: list[int]) -> Any:
    import numpy as np

    return np.array(ids, np.int32)
