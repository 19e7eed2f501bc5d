"""A body's words on whose it is are hints: texts alone, of any protocol."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from stenograph.dialects import chat, messages, responses
from stenograph.dialects.base import Request

USER = {"role": "user", "content": "x"}
PROTOCOLS = {
    "chat": (chat.parse_request, {"messages": [USER]}),
    "messages": (messages.parse_request, {"messages": [USER], "max_tokens": 1}),
    "responses": (responses.parse_request, {"input": "x"}),
}
each_protocol = pytest.mark.parametrize(("parse", "body"), PROTOCOLS.values(), ids=PROTOCOLS)


@each_protocol
def test_what_a_body_says_of_its_client_is_kept(parse: Callable[[bytes], Request], body: dict[str, Any]) -> None:
    said = {
        "prompt_cache_key": "k",
        "metadata": {"user_id": "u", "other": "o"},
        "client_metadata": {"thread": "t", "number": 3, "long": "x" * 5000},
    }
    assert parse(json.dumps(body | said).encode()).hints == {
        "prompt_cache_key": "k",
        "user_id": "u",
        "client_metadata.thread": "t",
        "client_metadata.long": "x" * 4096,
    }


@each_protocol
def test_other_values_hint_at_nothing(parse: Callable[[bytes], Request], body: dict[str, Any]) -> None:
    said = {"prompt_cache_key": 3, "metadata": {"user_id": ["u"]}, "client_metadata": ["x"]}
    assert parse(json.dumps(body | said).encode()).hints == {}
    assert parse(json.dumps(body | {"metadata": "x", "client_metadata": None}).encode()).hints == {}
