"""Each equivalence accepts what clients were seen to do, and nothing that says something else."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.config import MatchingConfig
from stenograph.traces.equivalences import NAMES, accept
from stenograph.types import Message, ToolCall
from support.arbitrary import values


def test_every_equivalence_has_its_setting() -> None:
    assert set(MatchingConfig.model_fields) == set(NAMES)
    assert all(MatchingConfig().model_dump().values())


def calls(arguments: str, id: str = "call_1", name: str = "f") -> Message:
    return Message("assistant", tool_calls=(ToolCall(id, name, arguments),))


JSON = values(("a", "b", "10", "9")).filter(lambda value: not re.search("NaN|Infinity", json.dumps(value)))


def said(content: str, reasoning: str = "") -> Message:
    return Message("assistant", content, reasoning)


HEADER = "x-agent-billing-header: cc_version=2.1.197.{}; cc_entrypoint=cli;\nYou are an agent."

ACCEPTED = [
    (calls('{"a": 1, "b": [1, 2]}'), calls('{"b":[1,2],"a":1}'), "arguments_respelled"),
    (calls('{"x": 1.0e4}'), calls('{"x":10000}'), "arguments_respelled"),
    (calls('{"x": 1.0e4}'), calls('{"x": 10000.0}'), "arguments_respelled"),
    (calls('{"x": 9007199254740993}'), calls('{"x":9007199254740992}'), "arguments_respelled"),
    (calls('{"x": -0.0}'), calls('{"x":0}'), "arguments_respelled"),
    (calls('{"x": "h\\u00e9llo"}'), calls('{"x":"héllo"}'), "arguments_respelled"),
    (calls('{"x": '), calls("{}"), "arguments_mended"),
    (calls(""), calls("{}"), "arguments_respelled"),
    (calls('{"x": "a'), calls(orjson.dumps({"raw": '{"x": "a'}).decode()), "arguments_mended"),
    (calls('{"x": "some words'), calls('{"x": "some words"}'), "arguments_mended"),
    (calls('{"x": 1, "y": "cut o'), calls('{"x":1}'), "arguments_mended"),
    (calls("{'x': True, 'y': None}"), calls('{"x":true,"y":null}'), "arguments_mended"),
    (calls("{}", name="Bash"), calls("{}", name="bash"), "call_mended"),
    (calls('{"x": "a', name="bash"), calls('{"tool":"bash","error":"no JSON"}', name="invalid"), "call_mended"),
    (calls('{"x": 1}', name="shell"), calls('{"error":"no such","tool":"shell"}', name="invalid"), "call_mended"),
    (calls("{}"), calls("{}", id="toolu_x"), "ids_changed"),
    (calls("{}"), calls("{}", id=""), "ids_changed"),
    (Message("tool", "r", tool_call_id="call_1"), Message("tool", "r", tool_call_id="x"), "ids_changed"),
    (Message("tool", "r", tool_call_id="call_1"), Message("tool", "r"), "ids_changed"),
    (said("text", "thought"), said("text"), "reasoning_dropped"),
    (said("text", "thought"), said("<think>\nthought\n</think>\n\ntext"), "reasoning_in_content"),
    (said("", "thought"), said("<thinking>thought</thinking>"), "reasoning_in_content"),
    (said("\n\n"), said(""), "whitespace_dropped"),
    (said("text\n"), said("text"), "whitespace_dropped"),
    (said("text", "thought "), said("text", "thought"), "whitespace_dropped"),
    (Message("user", "one\ntwo", joints=(4,)), Message("user", "onetwo"), "blocks_joined"),
    (Message("user", "one\ntwo\nthree", joints=(4, 8)), Message("user", "one\n\ntwothree"), "blocks_joined"),
    (Message("user", "one\n\ntwo"), Message("user", "one\ntwo", joints=(4,)), "blocks_joined"),
    (Message("assistant", "b"), Message("assistant", "b", name="helper"), "name_changed"),
    (Message("tool", "r", name="f"), Message("tool", "r"), "name_changed"),
    (calls("{}"), calls(""), "arguments_respelled"),
    (calls('{"a": NaN, "b": "\\ud800"}'), calls('{"b":"\\ud800","a":NaN}'), "arguments_respelled"),
    (calls('{"a": 1e400}'), calls('{"a":1e400}'), "arguments_respelled"),
    (calls('{"a": {"b": 1}, "c": "x'), calls('{"a":{"b":1}}'), "arguments_mended"),
    (said("text", "a </think> b"), said("<think>a </think> b</think>text"), "reasoning_in_content"),
    (said("text", "thought"), said("<reasoning>thought</reasoning>text"), "reasoning_in_content"),
    (Message("system", HEADER.format("d55")), Message("system", HEADER.format("4c0")), "header_changed"),
]


@pytest.mark.parametrize(
    ("recorded", "came", "name"), ACCEPTED, ids=[f"{n}-{row[2]}" for n, row in enumerate(ACCEPTED)]
)
def test_what_clients_do_is_accepted_by_one_name(recorded: Message, came: Message, name: str) -> None:
    assert accept(recorded, came) == (name,)
    assert accept(recorded, came, [other for other in NAMES if other != name]) is None


def test_differences_are_accepted_together() -> None:
    recorded = Message("assistant", "\n\n", "thought", (ToolCall("call_1", "f", '{"a": 1}'),))
    came = Message("assistant", "", "", (ToolCall("x", "f", '{"a":1}'),))
    names = ("ids_changed", "arguments_respelled", "reasoning_dropped", "whitespace_dropped")
    assert accept(recorded, came) == names
    named, renamed = calls('{"a": 1}', name="Bash"), calls('{"a":1}', name="bash")
    assert accept(named, renamed) == ("call_mended", "arguments_respelled")
    split = Message("assistant", "<think>\nwhy\nso\n</think>\n\nonetwo", joints=(28,))
    assert split.content[28:] == "two"
    assert accept(said("one\ntwo", "why\nso"), split) == ("reasoning_in_content", "blocks_joined")


REFUSED = [
    (calls('{"n": 1'), calls('{"n": -1}')),
    (calls('{"op": "+", "x": 5'), calls('{"op": "-", "x": 5}')),
    (calls('{"path": "../a"'), calls('{"path": "/a"}')),
    (calls('{"path": "README"'), calls('{"path": "readme"}')),
    (calls('{"cmd": "rm -rf /tmp/x"'), calls('{"cmd": "rm"}')),
    (Message("user", "x = 1\ny = 2"), Message("user", "x = 1y = 2")),
    (Message("user", "a\nb\nc", joints=(2,)), Message("user", "a\nbc")),
    (Message("user", "a\nb", joints=(2,)), Message("user", "a\nb\nx")),
    (Message("tool", "    return 1"), Message("tool", "return 1")),
    (Message("user", "a", name="Ann"), Message("user", "a", name="Bob")),
    (Message("system", "Plot.\nx-axis: unit=m"), Message("system", "Plot.\nx-axis: unit=ft")),
    (Message("system", "x-axis: dollars"), Message("system", "x-axis: euros")),
    (calls('{"a": 1}'), calls('{"a": 2}')),
    (calls('{"a": 1}'), calls('{"a": true}')),
    (calls('{"a": 1}'), calls('{"a": "1"}')),
    (calls('{"a": null}'), calls("{}")),
    (calls('{"a": 1}'), calls("{}")),
    (calls('{"a": 1}'), calls('{"a": ')),
    (calls('{"a": "x'), calls('{"b": "x"}')),
    (calls('{"b": 1, "a": NaN}'), calls('{"a": 1}')),
    (calls('{"a": Infinity}'), calls('{"a": 1}')),
    (calls('{"a": "x'), calls('{"a": "y"}')),
    (calls("{}"), calls("{}", name="g")),
    (calls("{}", name="bash"), calls("{}", name="Bash")),
    (calls("{}", name="bash"), calls('{"tool":"edit","error":"no JSON"}', name="invalid")),
    (calls("{}", name="bash"), calls('{"tool":"bash","error":"no JSON","x":1}', name="task")),
    (calls("{}", name="bash"), calls('{"tool":"bash"', name="invalid")),
    (calls("{}"), calls('{"tool":"f","error":"e"}')),
    (calls("{}"), said("")),
    (said("text"), said("tex")),
    (said("text"), said("")),
    (said("text"), said("text", "thought")),
    (said("text", "thought"), said("text", "another")),
    (said("text", "thought"), said("<think>another</think>text")),
    (said("text", "thought"), said("<think>thought</think>other")),
    (Message("user", "a"), Message("system", "a")),
    (Message("user", "one two"), Message("user", "onetwo")),
    (Message("user", HEADER.format("d55")), Message("user", HEADER.format("4c0"))),
    (Message("system", HEADER.format("d55")), Message("system", HEADER.format("d55") + " And more.")),
    (Message("tool", "r"), Message("tool", "s")),
    (
        Message("tool", "r", tool_call_id="call_0123456789abcdef_0"),
        Message("tool", "r", tool_call_id="call_0123456789abcdef_1"),
    ),
]


@pytest.mark.parametrize(("recorded", "came"), REFUSED, ids=range(len(REFUSED)))
def test_what_says_something_else_is_not_accepted(recorded: Message, came: Message) -> None:
    assert accept(recorded, came) is None


@given(JSON, JSON)
def test_arguments_are_the_same_where_any_reader_says_so(one: object, other: object) -> None:
    recorded, came = (calls(json.dumps({"x": value})) for value in (one, other))
    if json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True):
        assert accept(recorded, came) is not None
    elif json.dumps(_as_doubles(one), sort_keys=True) != json.dumps(_as_doubles(other), sort_keys=True):
        assert accept(recorded, came) is None


def _as_doubles(value: Any) -> Any:
    """What JavaScript reads."""
    if isinstance(value, list):
        return [_as_doubles(inner) for inner in value]
    if isinstance(value, dict):
        return {key: _as_doubles(inner) for key, inner in value.items()}
    return float(value) + 0.0 if isinstance(value, int | float) and not isinstance(value, bool) else value


@given(st.text("ab\n ", max_size=8), st.text("ab\n ", max_size=8))
def test_texts_of_other_words_are_never_the_same(one: str, other: str) -> None:
    if "".join(one.split()) != "".join(other.split()):
        assert accept(said(one), said(other)) is None
