"""What an agent keeps of a conversation, written and read in each of the three protocols.

Whatever is chosen at random here means nothing: both spellings say the same to any reader of the protocol.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from stenograph.types import ToolCall

Protocol = Literal["chat", "messages", "responses"]
PATHS: dict[Protocol, str] = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One message. A reply has the name of its turn and, in Messages, the signature of its thinking."""

    role: Literal["user", "assistant", "tool"]
    texts: tuple[str, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    answers: str = ""  # the id of the call, for a tool's result
    turn: str = ""
    signature: str = ""


@dataclass(frozen=True, slots=True)
class Head:
    """What stands before the messages: the lines of the system text, and one tool."""

    lines: tuple[str, ...]
    tool: str  # its description


def write(protocol: Protocol, head: Head, items: Sequence[Item], chance: random.Random) -> dict[str, Any]:
    """The body of a request."""
    return {"chat": _write_chat, "messages": _write_messages, "responses": _write_responses}[protocol](
        head, items, chance
    )


def read(protocol: Protocol, body: dict[str, Any]) -> list[Item]:
    """The replies of an answer, one a choice."""
    return {"chat": _read_chat, "messages": _read_messages, "responses": _read_responses}[protocol](body)


PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}}


def _functions(head: Head) -> list[dict[str, Any]]:
    return [{"name": name, "description": head.tool, "parameters": PARAMETERS} for name in "fg"]


# --- chat completions --------------------------------------------------------------------------------------------


def _write_chat(head: Head, items: Sequence[Item], chance: random.Random) -> dict[str, Any]:
    system: Any = "\n".join(head.lines)
    if chance.random() < 0.5:
        system = [{"type": "text", "text": f"{line}\n"} for line in head.lines[:-1]]
        system.append({"type": "text", "text": head.lines[-1]})
    messages = [{"role": "system", "content": system}, *(_chat_message(item, chance) for item in items)]
    tools = [{"type": "function", "function": function} for function in _functions(head)]
    return {"messages": messages, "tools": tools, "n": chance.choice([1, 1, 1, 2])}


def _chat_message(item: Item, chance: random.Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": item.role}
    if len(item.texts) > 1 or (item.texts and chance.random() < 0.2):
        message["content"] = [{"type": "text", "text": text} for text in item.texts]
    elif item.texts:
        message["content"] = item.texts[0]
    elif (nothing := chance.choice(["", None, "absent"])) != "absent":
        message["content"] = nothing
    if item.role == "assistant":
        message |= dict.fromkeys(chance.sample(["refusal", "audio", "function_call"], chance.randrange(3)))
    if item.reasoning:
        message[chance.choice(["reasoning_content", "reasoning"])] = item.reasoning
    if item.calls:
        message["tool_calls"] = [_chat_call(n, call, chance) for n, call in enumerate(item.calls)]
    if item.answers:
        message["tool_call_id"] = item.answers
    return message


def _chat_call(index: int, call: ToolCall, chance: random.Random) -> dict[str, Any]:
    wire = {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    wire |= {"id": call.id} if call.id else {}
    return wire | ({"index": index} if chance.random() < 0.3 else {})


def _read_chat(body: Any) -> list[Item]:
    name = body["id"].removeprefix("chatcmpl-")
    items = []
    for n, choice in enumerate(body["choices"]):
        message = choice["message"]
        calls = [
            ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ]
        texts = (message["content"],) if message["content"] else ()
        turn = f"{name}_{n}" if n else name
        items.append(Item("assistant", texts, message.get("reasoning_content", ""), tuple(calls), turn=turn))
    return items


# --- messages ----------------------------------------------------------------------------------------------------


def _write_messages(head: Head, items: Sequence[Item], chance: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for role, run in groupby(items, lambda item: item.role):
        if role == "tool":
            messages.append({"role": "user", "content": [_result_block(item, chance) for item in run]})
            continue
        for item in run:
            blocks = _blocks(item)
            before = messages[-1]["content"] if messages and role == "user" else ()
            behind_results = bool(before) and all("tool_use_id" in block for block in before)
            if behind_results and chance.random() < 0.5:
                messages[-1]["content"] += blocks
            else:
                plain = len(blocks) == 1 and blocks[0]["type"] == "text" and chance.random() < 0.5
                messages.append({"role": role, "content": blocks[0]["text"] if plain else blocks})
    system: Any = "\n".join(head.lines)
    if chance.random() < 0.5:
        system = [{"type": "text", "text": line} for line in head.lines]
    marked = [block for message in messages if isinstance(message["content"], list) for block in message["content"]]
    if marked and chance.random() < 0.7:
        chance.choice(marked)["cache_control"] = {"type": "ephemeral"}
    tools = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
        for one in _functions(head)
    ]
    return {"system": system, "messages": messages, "tools": tools, "max_tokens": 1000}


def _result_block(item: Item, chance: random.Random) -> dict[str, Any]:
    content: Any = "\n".join(item.texts) if chance.random() < 0.5 else [_text_block(text) for text in item.texts]
    wire = {"type": "tool_result", "tool_use_id": item.answers, "content": content}
    return wire | ({"is_error": False} if chance.random() < 0.3 else {})


def _blocks(item: Item) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if item.reasoning:
        blocks.append({"type": "thinking", "thinking": item.reasoning, "signature": item.signature})
    blocks += [_text_block(text) for text in item.texts]
    for call in item.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    return blocks


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _read_messages(body: Any) -> list[Item]:
    texts, calls, reasoning, signature = [], [], "", ""
    for block in body["content"]:
        match block["type"]:
            case "text":
                texts.append(block["text"])
            case "thinking":
                reasoning, signature = block["thinking"], block["signature"]
            case "tool_use":
                calls.append(ToolCall(block["id"], block["name"], json.dumps(block["input"])))
    turn = body["id"].removeprefix("msg_")
    return [Item("assistant", tuple(texts), reasoning, tuple(calls), turn=turn, signature=signature)]


# --- responses ---------------------------------------------------------------------------------------------------


def _write_responses(head: Head, items: Sequence[Item], chance: random.Random) -> dict[str, Any]:
    tools = [{"type": "function", **function, "strict": False} for function in _functions(head)]
    wire = [one for item in items for one in _items(item, chance)]
    return {"instructions": "\n".join(head.lines), "input": wire, "tools": tools}


def _items(item: Item, chance: random.Random) -> list[dict[str, Any]]:
    if item.role == "tool":
        return [{"type": "function_call_output", "call_id": item.answers, "output": "".join(item.texts)}]
    if item.role == "user":
        content: Any = [{"type": "input_text", "text": text} for text in item.texts]
        content = item.texts[0] if len(item.texts) == 1 and chance.random() < 0.5 else content
        return [{"role": "user", "content": content} | ({"type": "message"} if chance.random() < 0.5 else {})]
    wire: list[dict[str, Any]] = []
    if item.reasoning:
        thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": item.reasoning}]}
        wire.append(_named(thought, "rs", item))
    if item.texts or not (item.reasoning or item.calls):
        content = [{"type": "output_text", "text": text, "annotations": []} for text in item.texts]
        wire.append(_named({"type": "message", "role": "assistant", "content": content}, "msg", item))
    for n, call in enumerate(item.calls):
        called = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
        wire.append(_named(called, "fc", item, f"_{n}"))
    return wire


def _named(wire: dict[str, Any], prefix: str, item: Item, end: str = "") -> dict[str, Any]:
    return {"id": f"{prefix}_{item.turn}{end}", **wire} if item.turn else wire


def _read_responses(body: Any) -> list[Item]:
    texts, calls, reasoning = [], [], ""
    for item in body["output"]:
        match item["type"]:
            case "reasoning":
                reasoning += "".join(part["text"] for part in item["summary"])
            case "message":
                texts += [part["text"] for part in item["content"] if part["text"]]
            case "function_call":
                calls.append(ToolCall(item["call_id"], item["name"], item["arguments"]))
    return [Item("assistant", tuple(texts), reasoning, tuple(calls), turn=body["id"].removeprefix("resp_"))]
