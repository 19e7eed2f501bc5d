"""Requests and turns of the Responses protocol, made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from stenograph.dialects import responses
from stenograph.dialects.base import Answered, Writer
from stenograph.types import FinishReason, Message, Reply
from support.turns import make_turn

NAME, OTHER = "0123456789abcdef", "fedcba9876543210"
SHELL = {"type": "function", "name": "shell", "description": "run", "parameters": {"type": "object"}, "strict": False}
CLOSE = {"type": "function", "name": "close", "description": None, "parameters": None}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "others", "tools": [CLOSE]}
TOOLS = [SHELL, AGENTS, PATCH]


def parse(**body: Any) -> responses.ResponsesRequest:
    return responses.parse_request(json.dumps({"model": "m", "input": "hi", **body}).encode())


def read(*items: dict[str, Any]) -> tuple[Message, ...]:
    return parse(input=list(items)).conversation.messages


def make_answered(shown: Reply, finish_reason: FinishReason = "stop") -> Answered:
    turn = replace(make_turn([1, 2, 3], [4, 5]), id=f"turn_{NAME}", reply=shown, finish_reason=finish_reason)
    return Answered(turn, np.arange(3, dtype=np.int32), 1, shown)


def make_writer(request: responses.ResponsesRequest) -> Writer:
    return request.writer(NAME, 1_700_000_000, lambda ids: "".join(f"<{id}>" for id in ids))
