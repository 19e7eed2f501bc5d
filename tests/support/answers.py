"""What an answer says to a client, read the same from all three protocols, streamed or whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@dataclass(frozen=True, slots=True)
class Said:
    """One reply. `calls` are (name, arguments), `ids` (what it names, id) in the order of the answer."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    ids: tuple[tuple[str, str], ...]
    seals: tuple[str, ...]  # signatures and encrypted reasoning


def said(path: str, content: Any) -> Said:
    """A reply from its content: a chat message, a list of Messages' blocks or of Responses' items."""
    return {CHAT: _said_in_chat, MESSAGES: _said_in_messages, RESPONSES: _said_in_responses}[path](content)


def read(path: str, body: bytes, streamed: bool) -> tuple[Any, str]:
    """The content of an answer that arrived to its end, and the reason that it ended for."""
    if streamed:
        return {CHAT: _chat_stream, MESSAGES: _messages_stream, RESPONSES: _responses_stream}[path](events(body))
    answer = json.loads(body)
    if path == CHAT:
        [choice] = answer["choices"]
        return choice["message"], choice["finish_reason"]
    if path == MESSAGES:
        return answer["content"], answer["stop_reason"]
    return answer["output"], answer["status"]


def events(body: bytes) -> list[Any]:
    """The data of a stream's events, less comments; chat's last one is the text [DONE], and chat's have no names."""
    data: list[Any] = []
    for block in body.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if "data" in fields:
            data.append("[DONE]" if fields["data"] == "[DONE]" else json.loads(fields["data"]))
            assert "event" not in fields or fields["event"] == data[-1]["type"]
    return data


# --- chat completions --------------------------------------------------------------------------------------------


def _said_in_chat(message: dict[str, Any]) -> Said:
    calls = message.get("tool_calls") or []
    return Said(
        message.get("content") or "",
        message.get("reasoning_content") or "",
        tuple((call["function"]["name"], call["function"]["arguments"]) for call in calls),
        tuple(("call", call["id"]) for call in calls),
        (),
    )


def _chat_stream(data: list[Any]) -> tuple[Any, str]:
    assert data[-1] == "[DONE]"
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reasons = []
    for choice in (choice for event in data[:-1] for choice in event["choices"]):
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"id": call["id"], "function": {**call["function"]}})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    [reason] = reasons
    return message, reason


# --- messages ----------------------------------------------------------------------------------------------------


def _said_in_messages(blocks: list[dict[str, Any]]) -> Said:
    calls = [block for block in blocks if block["type"] == "tool_use"]
    thoughts = [block for block in blocks if block["type"] == "thinking"]
    return Said(
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        "".join(block["thinking"] for block in thoughts),
        tuple((call["name"], _arguments(call)) for call in calls),
        tuple(("call", call["id"]) for call in calls),
        tuple(block["signature"] for block in thoughts),
    )


def _arguments(call: dict[str, Any]) -> str:
    """As they were streamed; outside of a stream the protocol has an object, whatever its spelling was."""
    for name in ("_streamed_input_json", "_s"):
        if name in call:
            return str(call[name])
    return json.dumps(call["input"])


def _messages_stream(data: list[Any]) -> tuple[Any, str]:
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
    return blocks, data[-2]["delta"]["stop_reason"]


# --- responses ---------------------------------------------------------------------------------------------------


def _said_in_responses(items: list[dict[str, Any]]) -> Said:
    kinds: dict[str, list[dict[str, Any]]] = {"reasoning": [], "message": [], "function_call": []}
    for item in items:
        kinds[item["type"]].append(item)
    return Said(
        "".join(part["text"] for item in kinds["message"] for part in item["content"]),
        "".join(part["text"] for item in kinds["reasoning"] for part in item["summary"]),
        tuple((item["name"], item["arguments"]) for item in kinds["function_call"]),
        tuple((name, item[name]) for item in items for name in ("id", "call_id") if name in item),
        tuple(item["encrypted_content"] for item in kinds["reasoning"] if item.get("encrypted_content")),
    )


def _responses_stream(data: list[Any]) -> tuple[Any, str]:
    assert data[-1]["type"] == "response.completed"
    items = [event["item"] for event in data if event["type"] == "response.output_item.done"]
    assert items == data[-1]["response"]["output"]  # some clients act on these, others on those
    return items, data[-1]["response"]["status"]
