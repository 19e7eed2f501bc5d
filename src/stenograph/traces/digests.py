"""What tells messages apart: equal digests say the same to the model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import orjson

from stenograph.types import Conversation, Message, Tool


def conversation_labels(conversation: Conversation) -> Sequence[bytes]:
    """What a conversation is searched by: its tools, then message by message."""
    return (tools_digest(conversation.tools), *message_digests(conversation.messages))


def message_digests(messages: Iterable[Message]) -> Iterator[bytes]:
    return map(message_digest, messages)


def message_digest(message: Message) -> bytes:
    """Ids of calls are left out: clients replace them, and what the model sees of a call is its name and arguments."""
    calls = [[call.name, _canonical(call.arguments)] for call in message.tool_calls]
    seen = orjson.dumps([message.role, message.content, message.reasoning, calls, message.name])
    return hashlib.blake2b(seen, digest_size=16).digest()


def tools_digest(tools: tuple[Tool, ...]) -> bytes:
    # Parameters are written apart: as deep as they may be, they are not deeper for being in a list.
    described = [(t.name, t.description, orjson.dumps(t.parameters, option=orjson.OPT_SORT_KEYS)) for t in tools]
    written = orjson.dumps([(name, told, parameters.decode()) for name, told, parameters in described])
    return hashlib.blake2b(written, digest_size=16).digest()


def _canonical(arguments: str) -> str:
    """Arguments in one spelling. A protocol that carries them as an object loses the model's own on the way."""
    try:
        return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return arguments
