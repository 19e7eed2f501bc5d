"""What tells messages apart: equal digests are the same record, ids included. Each is computed once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import orjson

from stenograph.types import Conversation, Message, Tool


def conversation_labels(conversation: Conversation) -> tuple[bytes, ...]:
    """What a conversation is searched by: its tools, then message by message."""
    if not conversation.labels:
        labels = (tools_digest(conversation.tools), *message_digests(conversation.messages))
        object.__setattr__(conversation, "labels", labels)
    return conversation.labels


def message_digests(messages: Iterable[Message]) -> list[bytes]:
    return [message.digest or _digest_of_message(message) for message in messages]


def tools_digest(tools: tuple[Tool, ...]) -> bytes:
    return _digest(b"".join(tool.digest or _digest_of_tool(tool) for tool in tools))


def _digest_of_message(message: Message) -> bytes:
    calls = [[call.id, call.name, call.arguments] for call in message.tool_calls]
    held = [message.role, message.content, message.reasoning, calls, message.tool_call_id, message.name]
    return _keep(message, orjson.dumps(held))


def _digest_of_tool(tool: Tool) -> bytes:
    # Parameters are written apart: as deep as they may be, they are not deeper for being in a list.
    parameters = orjson.dumps(tool.parameters, option=orjson.OPT_SORT_KEYS).decode()
    return _keep(tool, orjson.dumps([tool.name, tool.description, parameters]))


def _keep(record: Message | Tool, written: bytes) -> bytes:
    digest = _digest(written)
    object.__setattr__(record, "digest", digest)  # frozen as it is, it says the same for ever
    return digest


def _digest(written: bytes) -> bytes:
    return hashlib.blake2b(written, digest_size=16).digest()
