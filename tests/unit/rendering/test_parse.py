"""Reading sampled ids: arguments keep their spelling, what is no call stays text, streams agree with the whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.rendering import Rendering
from stenograph.rendering.arguments import raw_arguments, raw_value
from stenograph.types import Conversation, Ids, Message, Reply, Tool, ToolCall
from support.tokenizers import FAMILY_TOKENS, any_family, example, family, tagged_family

ASKED = Conversation((Message("user", "2 + 3?"),))
FAMILY, EXAMPLE = family(), example()
RENDERINGS = {"family": FAMILY, "example": EXAMPLE}
STREAMED = {
    **RENDERINGS,
    "prefilled": FAMILY,
    "prefilled example": EXAMPLE,
}
ODD_ARGUMENTS = [
    '{"x": 1.0e4}',
    '{"x":1E+2,   "y" :[ ]}',
    '{"t": "h\\u00e9llo \\ud83d\\ude00"}',
    '{"b": 1, "a": 2, "b": 3}',
    '{"q": "} </tool> \\" {"}',
    "{ }",
    "[1]",
    '"text"',
    "NaN",
    '{"é": "日本"}',
]


@pytest.fixture(params=list(RENDERINGS))
def rendering(request: pytest.FixtureRequest) -> Rendering:
    return RENDERINGS[request.param]


def _parse(rendering: Rendering, text: str) -> Reply:
    return rendering.parse(rendering.encode_text(text), rendering.render(ASKED), ASKED)


@pytest.mark.parametrize("arguments", ODD_ARGUMENTS)
def test_arguments_keep_the_spelling_of_the_model(rendering: Rendering, arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments} , "more": 1}}\n</tool_call><|im_end|>'
    assert _parse(rendering, text) == Reply(tool_calls=(ToolCall("", "f", arguments),))


@pytest.mark.parametrize("arguments", [*ODD_ARGUMENTS, "not json"])
def test_a_reply_survives_encoding(rendering: Rendering, arguments: str) -> None:
    calls = (ToolCall("", "f", arguments), ToolCall("", "g", "{}"))
    ids = rendering.encode_reply(Reply("Two calls.", "Hm.\nYes.", calls))
    assert ids[-1] in rendering.stop_token_ids
    assert f'"arguments": {arguments}}}' in rendering.decode(ids)
    if arguments != "not json":
        assert rendering.parse(ids, rendering.render(ASKED), ASKED) == Reply("Two calls.", "Hm.\nYes.", calls)


@pytest.mark.parametrize("reply", [Reply("Hi"), Reply("Hi", "Hm."), Reply(tool_calls=(ToolCall("", "f", "{}"),))])
def test_replies_of_every_kind_survive_encoding(rendering: Rendering, reply: Reply) -> None:
    assert rendering.parse(rendering.encode_reply(reply), rendering.render(ASKED), ASKED) == reply


@pytest.mark.parametrize("name", FAMILY_TOKENS)
def test_what_any_family_would_write_is_read_back(name: str) -> None:
    rendering = any_family(name)
    asked = Conversation(ASKED.messages, (Tool("f", "", {"type": "object", "properties": {"e": {"type": "string"}}}),))
    prompt = rendering.render(asked)
    call = ToolCall("", "f", '{"e": "1"}')
    for reply in (Reply("Hi."), Reply("Hi.", "Hm."), Reply(tool_calls=(call,)), Reply("On it.", tool_calls=(call,))):
        read = rendering.parse(rendering.encode_reply(reply), prompt, asked)
        calls = [(call.name, json.loads(call.arguments)) for call in read.tool_calls]
        assert calls == [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]
        assert read.reasoning in (reply.reasoning, "")  # not every family has reasoning
        assert read.content == reply.content or (name == "llama-3" and calls)


@pytest.mark.parametrize(
    "bad",
    [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        "<tool_call>f(1)</tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>\n{"name": "f", "argum',
        '<tool_call>\n{"name": "f", "arguments": {}}',
        '<tool_call>{"name": "f", "arguments": ' + "[" * 100_000 + "</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"n": ' + "1" * 5000 + "}}</tool_call>",
    ],
)
def test_a_call_that_does_not_parse_stays_as_it_was_written(rendering: Rendering, bad: str) -> None:
    assert _parse(rendering, bad) == Reply(bad)
    assert _parse(rendering, bad).num_malformed_calls == 1
    assert _parse(rendering, f"<think>\nHm.\n</think>\n\nLook:\n\n{bad}<|im_end|>") == Reply(f"Look:\n\n{bad}", "Hm.")


@pytest.mark.parametrize("name", ["laguna-xs-2.1", "glm-4.5", "qwen3.5"])
def test_what_stands_before_a_bad_call_is_not_written_twice(name: str) -> None:
    text = "</think>Hi\n\n<tool_call>f"
    assert _parse(any_family(name), text).content.removeprefix("</think>") == "Hi\n\n<tool_call>f"


def test_a_bad_call_does_not_take_good_ones_with_it(rendering: Rendering) -> None:
    good = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    bad = "<tool_call>\n{]\n</tool_call>"
    reply = _parse(rendering, f"{good}\n{bad}\n{good}<|im_end|>")
    assert [call.arguments for call in reply.tool_calls] == ['{"a": 1}', '{"a": 1}']
    assert (reply.content, reply.num_malformed_calls) == (bad, 1)


def test_text_cut_inside_reasoning_is_reasoning(rendering: Rendering) -> None:
    assert _parse(rendering, "<think>\nStill thin") == Reply(reasoning="Still thin")


def test_tag_style_arguments_are_written_compactly() -> None:
    rendering = tagged_family()
    text = (
        '<think>\nHm.\n</think>\n\nHi<tool_call>\n<function=f>\n<parameter=a>\n{"arguments": 1}\n</parameter>\n'
        "<parameter=b>\nx y\n</parameter>\n</function>\n</tool_call><|im_end|>"
    )
    tool = Tool("f", "", {"type": "object", "properties": {"b": {"type": "string"}}})
    asked = Conversation(ASKED.messages, (tool,))
    reply = rendering.parse(rendering.encode_text(text), rendering.render(asked), asked)
    assert reply == Reply("Hi", "Hm.", (ToolCall("", "f", '{"a":{"arguments":1},"b":"x y"}'),))


def test_markers_of_another_format_come_from_the_response_schema(tmp_path: Path) -> None:
    schema = {
        "start_anchor": "assistant\n",
        "fields": {
            "content": {"content": "text"},
            "thinking": {"open": "[THINK]", "close": "[/THINK]", "content": "text"},
            "tool_calls": {
                "open_pattern": r"\[CALL (?P<name>\w+)\]",
                "close": "[/CALL]",
                "content": "json",
                "repeats": True,
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    }
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    rendering = example(response_schema=file)
    good = '[THINK]Hm.[/THINK]Hi[CALL f]{"a":  1}[/CALL]<|im_end|>'
    assert _parse(rendering, good) == Reply("Hi", "Hm.", (ToolCall("", "f", '{"a":1}'),))
    assert _parse(rendering, "Hi[CALL f]{a[/CALL]<|im_end|>") == Reply("Hi[CALL f]{a[/CALL]")
    stream = rendering.stream(rendering.render(ASKED), ASKED)
    assert stream.feed(rendering.encode_text(good)).content == ""
    assert stream.finish().content == "Hi"


PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "<|im_end|>", "<|im_start|>"),
    *("<|endoftext|>", "assistant\n", '{"name": "f", "arguments": {"a": "é"}}', '{"name": "f"', "\n", "  ", " \t\n"),
    *("Hello", "a b", "é", "日本", "😀", "<", "<tool", "<tool_call", "</thi", "nk>", "{", "�"),
]


@st.composite
def outputs(draw: st.DrawFn) -> tuple[list[str | int], int, list[int]]:
    """Pieces of text and single ids (bytes that may form no character), how much is cut off, and chunk sizes."""
    pieces = draw(st.lists(st.sampled_from(PIECES) | st.integers(128, 255), max_size=14))
    return pieces, draw(st.integers(0, 6)), draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))


def _ids(rendering: Rendering, pieces: list[str | int]) -> Ids:
    parts = [np.array([x], np.int32) if isinstance(x, int) else rendering.encode_text(x) for x in pieces]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


@pytest.mark.parametrize("name", STREAMED)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(output=outputs())
def test_a_stream_shows_what_the_whole_turn_says(name: str, output: tuple[list[str | int], int, list[int]]) -> None:
    rendering = STREAMED[name]
    prompt = rendering.render(ASKED)
    if name.startswith("prefilled"):
        prompt = np.concatenate([prompt, rendering.encode_text("<think>\n")])
    pieces, num_cut, sizes = output
    ids = _ids(rendering, pieces)
    ids = ids[: max(0, len(ids) - num_cut)]
    stream = rendering.stream(prompt, ASKED)
    deltas, at = [], 0
    while at < len(ids):
        size = sizes[len(deltas) % len(sizes)]
        deltas.append(stream.feed(ids[at : at + size]))
        at += size
    deltas.append(stream.finish())
    reply = rendering.parse(ids, prompt, ASKED)
    assert "".join(delta.content for delta in deltas) == reply.content
    assert "".join(delta.reasoning for delta in deltas) == reply.reasoning


def test_a_marker_spelled_in_letters_is_read_alike_in_parts_and_as_a_whole() -> None:
    prompt = FAMILY.render(ASKED)
    ids = _ids(FAMILY, ["<think>", "a", "</thi", "nk>", "b", "</think>", "c"])
    stream = FAMILY.stream(prompt, ASKED)
    shown = [stream.feed(ids), stream.finish()]
    reply = FAMILY.parse(ids, prompt, ASKED)
    assert "".join(delta.content for delta in shown) == reply.content
    assert "".join(delta.reasoning for delta in shown) == reply.reasoning == "a</think>b"


def test_text_leaves_as_it_arrives(rendering: Rendering) -> None:
    stream = rendering.stream(rendering.render(ASKED), ASKED)
    seen = []
    for token in rendering.encode_text("<think>\nHm é\n</think>\n\nSo < 3. <tool_call>"):
        delta = stream.feed(np.array([token], np.int32))
        seen.append(delta.reasoning or delta.content)
    shown = [text for text in seen if text]
    assert "".join(shown) in ("Hm éSo < 3.", "Hm éSo < 3. ")
    assert len(shown) >= 8
    assert max(len(text) for text in shown) <= 2  # a space leaves with what follows it


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(before=st.dictionaries(st.text(max_size=3), JSON, max_size=3), value=JSON, indent=st.sampled_from([None, 0, 2]))
def test_the_slice_of_a_value_is_its_text(before: dict[str, object], value: object, indent: int | None) -> None:
    text = json.dumps({**before, "arguments": value}, indent=indent)
    raw = raw_value(text, "arguments")
    assert raw is not None
    assert json.dumps(json.loads(raw)) == json.dumps(value)
    assert raw in text
    assert raw_value(text, "no such key") is None or "no such key" in before


@pytest.mark.parametrize(
    ("call", "arguments", "raw"),
    [
        ('functions.f:0<|args|>{"a":  1.0e4}', {"a": 1.0e4}, '{"a":  1.0e4}'),
        ('{"name": "f", "parameters": {"a" : "\\u00e9"}}', {"a": "é"}, '{"a" : "\\u00e9"}'),
        ("f<k>a</k><v>{}</v>", {"a": {}}, None),
        ('{"name": "f", "arguments": {"a": 1}}', {"a": 2}, None),
        ("{" * 100_000, {}, None),
    ],
)
def test_arguments_are_found_where_a_family_writes_them(call: str, arguments: object, raw: str | None) -> None:
    assert raw_arguments(call, arguments) == raw


def test_of_repeated_keys_the_last_counts() -> None:
    assert raw_value('{"a": 1, "a":  2 }', "a") == "2"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a"', '{"a": }', '{"a": 1', '{"a": 1 "b": 2}', '{"a": 1,}x', "1"])
def test_what_is_no_object_has_no_values(text: str) -> None:
    assert raw_value(text, "b") is None
