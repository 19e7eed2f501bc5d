"""The text between the brackets: a call's arguments exactly as the model spelled them."""

from __future__ import annotations

import json
from typing import TypeGuard

from stenograph.types import ToolCall

_DECODER = json.JSONDecoder()
_SPACE = " \t\n\r"
_MAX_OBJECTS = 4  # the call itself and what may stand before its arguments


def read_call(text: str) -> ToolCall | None:
    """The call that `text`, a JSON object with `name` and `arguments`, makes; None where it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = call.get("name") if isinstance(call, dict) else None
    if not is_name(name):
        return None
    raw = raw_value(text, "arguments")
    return ToolCall("", name, "{}" if raw is None else raw)


def is_name(name: object) -> TypeGuard[str]:
    """Whether a function may be called so; JSON can spell half a surrogate pair, which no response could carry."""
    return isinstance(name, str) and name != "" and not any("\ud800" <= letter <= "\udfff" for letter in name)


def compact(arguments: object) -> str:
    """Arguments as JSON text, for formats in which the model writes none."""
    return json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))


def raw_arguments(call: str, arguments: object) -> str | None:
    """The text in `call` that says `arguments`, which a family's own parser read; None where no JSON in it does.

    Families write the object under a key of its own, or bare behind the name; a tag-style call may hold other JSON.
    """
    raw = raw_value(call, "arguments")
    if raw is not None and _means(raw, arguments):
        return raw
    at = -1
    for _ in range(_MAX_OBJECTS):
        at = call.find("{", at + 1)
        if at < 0:
            break
        try:
            end = _DECODER.raw_decode(call, at)[1]
        except (ValueError, RecursionError):
            continue
        if _means(call[at:end], arguments):
            return call[at:end]
    return None


def raw_value(text: str, key: str) -> str | None:
    """The text of `key`'s value in the JSON object `text`, untouched; None where `text` is no such object.

    Of repeated keys the last counts, as in `json.loads`.
    """
    at = _skip_space(text, 0)
    if text[at : at + 1] != "{":
        return None
    at = _skip_space(text, at + 1)
    found: str | None = None
    try:
        while text[at : at + 1] == '"':
            name, at = _DECODER.raw_decode(text, at)
            at = _skip_space(text, at)
            if text[at : at + 1] != ":":
                return None
            start = _skip_space(text, at + 1)
            _, at = _DECODER.raw_decode(text, start)
            if name == key:
                found = text[start:at]
            at = _skip_space(text, at)
            if text[at : at + 1] != ",":
                break
            at = _skip_space(text, at + 1)
    except (ValueError, RecursionError):
        return None
    return found if text[at : at + 1] == "}" else None


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _means(raw: str, value: object) -> bool:
    try:
        return compact(json.loads(raw)) == compact(value)  # as text, for NaN is not equal to itself
    except (ValueError, RecursionError):
        return False
