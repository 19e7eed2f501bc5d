"""Cuts recorded traffic small: a long text becomes its beginning and a hash, the same text always the same one.

So texts that were equal stay equal and others stay different. White space at both ends, the structure of messages, ids,
the layout of JSON in texts and the headers that say something stay as they were on the wire. A long field of a body
that is, byte for byte, that of the request before is written as "=".

    python tests/traffic/cut.py RECORDING.jsonl.gz...

writes each recording beside this file; its `.expected.json` is written by hand.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

_LONGEST = 60  # characters of a text that is kept whole
_KEPT = 20  # characters of the beginning of any other
_LONGEST_SCHEMA = 120  # characters of a tool's schema that is kept whole
_SAME = "="
_SCHEMAS = ("parameters", "input_schema")
_SAY_NOTHING = re.compile(
    r"accept-encoding|accept-language|connection|sec-fetch-mode|user-agent|x-msh-.*|"
    r"anthropic-(beta|dangerous-.*)|originator|x-client-request-id|x-codex-beta-features|"
    r"x-stainless-(arch|lang|os|package-version|runtime|runtime-version|async|timeout|read-timeout)",
    re.IGNORECASE,
)


def cut(recording: str) -> str:
    """A recording, one JSON object a line, with every long text cut."""
    lines, before = [], {}
    for row in map(json.loads, filter(None, recording.split("\n"))):
        body = _value(row["body"] or {})
        kept = {name: row[name] for name in ("i", "method", "path", "query") if row.get(name)}
        kept["headers"] = [[name, value] for name, value in row["headers"] if not _SAY_NOTHING.fullmatch(name)]
        kept["body"] = {name: _SAME if _repeats(before.get(name), value) else value for name, value in body.items()}
        lines.append(_dumps(kept | {"reply": _value(row["reply"])}) + "\n")
        before = body
    return "".join(lines)


def uncut(lines: str) -> list[dict[str, Any]]:
    """The rows of a recording that is cut, with the repeated fields in their places."""
    rows, before = [], {}
    for row in map(json.loads, filter(None, lines.split("\n"))):
        row["body"] = before = {k: before[k] if v == _SAME else v for k, v in row["body"].items()}
        rows.append(row)
    return rows


def _repeats(before: Any, value: Any) -> bool:
    text = _dumps(value)
    return len(text) > _LONGEST and text == _dumps(before)


def _value(value: Any) -> Any:
    match value:
        case str():
            return _text(value)
        case list():
            return [_value(item) for item in value]
        case dict():
            return {name: _schema(item) if name in _SCHEMAS else _value(item) for name, item in value.items()}
        case _:
            return value


def _text(text: str) -> str:
    stripped = text.strip()
    if len(text) <= _LONGEST or _is_json(stripped):
        return text
    start = len(text) - len(text.lstrip())
    return f"{text[:start]}{stripped[:_KEPT]}... {_hash(stripped)}{text[start + len(stripped) :]}"


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    text = _dumps(schema)
    return schema if len(text) <= _LONGEST_SCHEMA else {"type": "object", "properties": {}, "title": _hash(text)}


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        (Path(__file__).parent / path.stem).write_text(cut(gzip.decompress(path.read_bytes()).decode()))
