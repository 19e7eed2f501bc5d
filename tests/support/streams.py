"""Streamed answers put together as a client does: the body that would have come whole."""

from __future__ import annotations

import json
from typing import Any

from support.wires import Protocol


def assembled(protocol: Protocol, stream: bytes) -> dict[str, Any]:
    """The body of a stream that was read to its end."""
    assert stream.endswith(b"\n\n")
    return {"chat": _chat, "messages": _messages, "responses": _responses}[protocol](events(stream))


def events(stream: bytes) -> list[Any]:
    """The data of a stream's events, less comments; chat's last one is the text [DONE], and chat's have no names."""
    data: list[Any] = []
    for block in stream.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if "data" in fields:
            data.append("[DONE]" if fields["data"] == "[DONE]" else json.loads(fields["data"]))
            assert "event" not in fields or fields["event"] == data[-1]["type"]
    return data


def unchunked(raw: bytes) -> bytes:
    """The body of an answer that came in HTTP's chunks."""
    _, _, rest = raw.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


def _chat(data: list[Any]) -> dict[str, Any]:
    assert data.pop() == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in data for choice in chunk["choices"]):
        begun = {"message": {"content": "", "reasoning_content": "", "tool_calls": []}, "finish_reason": None}
        whole, delta = choices.setdefault(choice["index"], begun), choice["delta"]
        message = whole["message"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"id": call["id"], "function": {**call["function"]}})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if choice["finish_reason"]:
            assert whole["finish_reason"] is None
            whole["finish_reason"] = choice["finish_reason"]
    assert all(whole["finish_reason"] for whole in choices.values())
    return {"id": data[0]["id"], "choices": [whole for _, whole in sorted(choices.items())]}


def _messages(data: list[Any]) -> dict[str, Any]:
    """A call's input is kept as it was streamed too, under the name that recorded traffic has for it."""
    assert [event["type"] for event in data[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    for event in data:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["_streamed_input_json"] = ""
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            name = delta["type"].removesuffix("_delta")
            if name == "input_json":
                block["_streamed_input_json"] += delta["partial_json"]
            else:
                block[name] = block.get(name, "") + delta[name]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["_streamed_input_json"])
    return {"id": data[0]["message"]["id"], "content": blocks, "stop_reason": data[-2]["delta"]["stop_reason"]}


def _responses(data: list[Any]) -> dict[str, Any]:
    response = data[-1]["response"]
    assert data[-1]["type"] == f"response.{response['status']}"
    # Some clients act on these, others on those.
    assert [event["item"] for event in data if event["type"] == "response.output_item.done"] == response["output"]
    return response
