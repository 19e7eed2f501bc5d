"""What is read can be written again, also where other JSON stands around it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from stenograph.dialects import chat, messages, responses
from stenograph.errors import RequestError


def nested(levels: int) -> dict[str, Any]:
    """A schema of objects and lists in turn, `levels` deep."""
    schema: Any = {}
    for level in range(1, levels):
        schema = {"not": schema} if level % 2 == 0 or level == levels - 1 else [schema]
    return schema


def in_chat(schema: Any) -> Any:
    return {"tools": [{"function": {"name": "f", "parameters": schema}}], "messages": [{"role": "user"}]}


def in_chats_format(schema: Any) -> Any:
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    return {"response_format": wanted, "messages": [{"role": "user"}]}


def in_messages(schema: Any) -> Any:
    said = {"role": "user", "content": "x"}
    return {"tools": [{"name": "f", "input_schema": schema}], "messages": [said], "max_tokens": 1}


def in_responses(schema: Any) -> Any:
    return {"tools": [{"type": "function", "name": "f", "parameters": schema}], "input": "x"}


PLACES: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], Any]]] = {
    "tools[0].function.parameters": (chat.parse_request, in_chat),
    "response_format.json_schema.schema": (chat.parse_request, in_chats_format),
    "tools[0].input_schema": (messages.parse_request, in_messages),
    "tools[0].parameters": (responses.parse_request, in_responses),
}


@pytest.mark.parametrize("field", PLACES)
def test_a_schema_is_no_deeper_than_can_be_written_inside_other_json(field: str) -> None:
    parse, make = PLACES[field]
    parse(json.dumps(make(nested(128))).encode())
    with pytest.raises(RequestError, match="at most 128 levels") as refused:
        parse(json.dumps(make(nested(129))).encode())
    assert refused.value.param == field
