"""Canonical records as the plain dicts that templates read; argument text passes through as it was written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stenograph.types import Conversation, Message, Tool


def tool_dicts(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Tools in the envelope that chat templates are written for; None where there are none."""
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in tools
    ]


def message_dicts(conversation: Conversation, start: int = 0, *, parse_arguments: bool = False) -> list[dict[str, Any]]:
    """messages[start:]; a tool result without a name takes that of the call it answers, wherever that call stands.

    `parse_arguments` is for templates that take an object; text that is no JSON stays text.
    """
    messages = conversation.messages
    return [_message_dict(messages, i, parse_arguments) for i in range(start, len(messages))]


def ends_reasoning(messages: Sequence[Message], num_known: int) -> bool:
    """Whether messages[num_known:] hold a new question and the tool cycle that it ends holds reasoning.

    What lies before the last known question ended the same way when that question was new.
    """
    if all(message.role != "user" for message in messages[num_known:]):
        return False
    for message in reversed(messages[:num_known]):
        if message.reasoning:
            return True
        if message.role == "user":
            return False
    return False


def _message_dict(messages: Sequence[Message], index: int, parse_arguments: bool) -> dict[str, Any]:
    message = messages[index]
    # Templates know one kind of instruction, and many drop a role that they do not know without a word.
    role = "system" if message.role == "developer" else message.role
    out: dict[str, Any] = {"role": role, "content": message.content}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {
                    "name": call.name,
                    "arguments": _parsed(call.arguments) if parse_arguments else call.arguments,
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    name = message.name or (_called_name(messages, index) if message.role == "tool" else None)
    if name:
        out["name"] = name
    return out


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _called_name(messages: Sequence[Message], index: int) -> str | None:
    """The name in the call that the tool result at `index` answers: the nearest call with its id."""
    wanted = messages[index].tool_call_id
    if wanted is None:
        return None
    for message in reversed(messages[:index]):
        for call in message.tool_calls:
            if call.id == wanted:
                return call.name
    return None
