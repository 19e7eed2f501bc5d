"""Whether two texts of a call's arguments say the same, as the clients that carry them can tell."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson


def is_object(text: str) -> bool:
    """Whether a function can be called with `text`."""
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def are_same(a: str, b: str) -> bool:
    """Whether any reader finds the same in both; no arguments are an empty object."""
    try:
        return bool(_plain(_read(a)) == _plain(_read(b)))
    except (ValueError, OverflowError, RecursionError):
        return False


def is_mended(raw: str, text: str) -> bool:
    """Whether `text`, an object, is what a client makes of `raw`, which is none: empty, holding it, or repaired."""
    if not raw.strip() or is_object(raw):
        return False
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    if not isinstance(value, dict):
        return False
    return not value or (len(value) == 1 and raw in value.values()) or _is_repaired(raw, text)


def are_complaint(text: str, name: str) -> bool:
    """Whether `text` says of a call of the tool `name` that it could not be made, and nothing else."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return isinstance(value, dict) and value.keys() == {"tool", "error"} and value["tool"] == name


def _is_repaired(raw: str, text: str) -> bool:
    """A repair adds quotes and brackets, or leaves out what was begun and not ended."""
    if _letters(raw) == _letters(text):
        return True
    kept, whole = ("".join(one.split()) for one in (text, raw))
    while kept.endswith(("}", "]")):
        kept = kept[:-1]
        if whole.startswith(kept + ","):
            return True
    return False


def _letters(text: str) -> str:
    """All but what JSON is built with, Python's words for its constants as JSON has them."""
    text = re.sub(r"\b(True|False|None)\b", lambda found: _CONSTANTS[found[0]], text)
    return re.sub(r"[\s\"'\[\]{},:\\]", "", text)


_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def _read(text: str) -> Any:
    try:
        return orjson.loads(text) if text.strip() else {}
    except orjson.JSONDecodeError:
        return json.loads(text)  # what Python writes beyond JSON: NaN, half a character


def _plain(value: Any) -> Any:
    """A value in which equality means the same to a client: its numbers are doubles, and true is no number."""
    if isinstance(value, bool):
        return (value,)
    if isinstance(value, int | float):
        number = float(value)
        return number if number == number else ("NaN",)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value
