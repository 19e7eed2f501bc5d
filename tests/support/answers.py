"""What an answer says to a client, read the same from all three protocols, streamed or whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from support.streams import assembled
from support.wires import Protocol

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
_PROTOCOLS: dict[str, Protocol] = {CHAT: "chat", MESSAGES: "messages", RESPONSES: "responses"}


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
    answer = assembled(_PROTOCOLS[path], body) if streamed else json.loads(body)
    if path == CHAT:
        [choice] = answer["choices"]
        return choice["message"], choice["finish_reason"]
    if path == MESSAGES:
        return answer["content"], answer["stop_reason"]
    assert not streamed or answer["status"] == "completed"
    return answer["output"], answer["status"]


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
