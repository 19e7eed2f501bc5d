"""Recorded traffic that is cut says as much of what is equal as before."""

from __future__ import annotations

import json

from traffic.cut import cut, uncut

LONG = "\n\nOnce upon a time " + "and again " * 20 + "the end. \n"
SPELLED = json.dumps({"command": "echo " + "x" * 100}, indent=1)


def _row(i: int, *texts: str) -> dict[str, object]:
    tools = [{"name": "f", "parameters": {"type": "object", "description": LONG}}]
    headers = [["User-Agent", "x"], ["session-id", "s"]]
    body = {"messages": [{"role": "user", "content": text} for text in texts], "tools": tools}
    return {"i": i, "method": "POST", "path": "/v1/messages", "headers": headers, "body": body, "reply": {"kind": "x"}}


def _texts(*texts: str) -> list[str]:
    [row] = uncut(cut(json.dumps(_row(1, *texts))))
    return [message["content"] for message in row["body"]["messages"]]


def test_texts_are_cut_to_the_same_where_they_are_the_same() -> None:
    first, again, other, trimmed = _texts(LONG, LONG, LONG.replace("end", "END"), LONG.strip())
    assert first == again != other
    assert len(first) < 40
    assert first.strip() == trimmed
    assert (first[:3], first[-2:]) == ("\n\nO", " \n")


def test_short_texts_and_json_stay_as_they_are_spelled() -> None:
    assert _texts("short ", SPELLED) == ["short ", SPELLED]


def test_a_field_that_repeats_is_written_once_and_read_in_every_request() -> None:
    lines = cut("\n".join(json.dumps(_row(i, "a" * i)) for i in (1, 2, 3)))
    first, *others = (json.loads(line) for line in lines.splitlines())
    assert [row["body"]["tools"] for row in others] == ["=", "="]
    assert [row["body"]["tools"] for row in uncut(lines)] == [first["body"]["tools"]] * 3
    assert first["headers"] == [["session-id", "s"]]
