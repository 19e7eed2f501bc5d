"""Streamed answers put together as a client does: the body that would have come whole."""

from __future__ import annotations

import json
from typing import Any

from support.wires import Protocol


def assembled(protocol: Protocol, stream: bytes) -> dict[str, Any]:
    """The body of a stream that was read to its end."""
    assert stream.endswith(b"\n\n")
    lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n") if line.startswith(b"data: ")]
    if protocol == "chat":
        assert lines.pop() == b"[DONE]"
    events = [json.loads(line) for line in lines]
    return {"chat": _chat, "messages": _messages, "responses": _responses}[protocol](events)


def unchunked(raw: bytes) -> bytes:
    """The body of an answer that came in HTTP's chunks."""
    _, _, rest = raw.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


def _chat(chunks: list[Any]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            message = choices.setdefault(choice["index"], {"content": "", "reasoning_content": "", "tool_calls": []})
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name, "")
            message["tool_calls"] += delta.get("tool_calls", ())
    return {"id": chunks[0]["id"], "choices": [{"message": message} for _, message in sorted(choices.items())]}


_ADDED = {
    "thinking_delta": "thinking",
    "text_delta": "text",
    "signature_delta": "signature",
    "input_json_delta": "json",
}


def _messages(events: list[Any]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                kind = _ADDED[event["delta"]["type"]]
                blocks[-1][kind] += next(said for name, said in event["delta"].items() if name != "type")
    assert events[-1]["type"] == "message_stop"
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    return {"id": events[0]["message"]["id"], "content": blocks}


def _responses(events: list[Any]) -> dict[str, Any]:
    return events[-1]["response"]
