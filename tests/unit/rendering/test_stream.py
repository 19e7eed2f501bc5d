"""Streaming: what was shown is at any time the start of what the whole turn says, and is shown as it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.rendering import Rendering
from stenograph.rendering.base import Delta, StreamParser
from stenograph.rendering.formats import FORMATS
from stenograph.rendering.stream import MarkerStream
from stenograph.types import Conversation, Ids, Message, Reply, Tool, ToolCall
from support.tokenizers import FAMILY_TOKENS, any_family, harmony

TOOL = Tool("f", "Do.", {"type": "object", "properties": {"e": {"type": "string"}}})
ASKED = Conversation((Message("user", "2 + 3?"),), (TOOL,))
OPTIONS: dict[str, tuple[str, dict[str, bool]]] = {
    "glm-4.5 without thinking": ("glm-4.5", {"enable_thinking": False}),
    "qwen3 without thinking": ("qwen3", {"enable_thinking": False}),
    "qwen3.5 without thinking": ("qwen3.5", {"enable_thinking": False}),
    "deepseek-v4 with thinking": ("deepseek-v4", {"enable_thinking": True}),
    "deepseek-v3 in letters": ("deepseek-v3", {"think_tokens": False}),
    "kimi-k2 in letters": ("kimi-k2", {"think_tokens": False}),
    "kimi-k2.5 in letters": ("kimi-k2.5", {"think_tokens": False}),
    "gemma4 in pieces": ("gemma4", {"pieces": True}),
    "gemma4 with thinking": ("gemma4", {"enable_thinking": True}),
    "laguna-xs.2 with thinking": ("laguna-xs.2", {"enable_thinking": True}),
}
NAMES = [*FAMILY_TOKENS, *OPTIONS]
LIVE = [name for name in NAMES if name != "kimi-k2.5 in letters"]  # whose prompt opens reasoning in letters
COMMON = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "é"}}', '{"name"'),
    *("\n", "  ", " \t\n", "Hello", "a b", "é", "日本", "😀", "<", "</", "</thi", "nk>", "<|", "{", "}", "�", "<thi"),
]
OWN: dict[str, list[str]] = {
    "deepseek-v4": [
        *(
            "<｜DSML｜tool_calls>\n",
            '<｜DSML｜invoke name="f">\n',
            "</｜DSML｜invoke>",
            "</｜DSML｜tool_calls>",
            "｜DSML",
        ),
        '<｜DSML｜parameter name="e" string="true">x</｜DSML｜parameter>\n',
    ],
    "kimi-k2.5": ["<|tool_call_section_begin|>", "<|tool_call_section_end|>", "<|tool_call_sec", "functions.f:0"],
    "kimi-k2": ["functions.f:0"],
    "gemma4": ["thought\n", "thought", "call:f{e:1}"],
    "deepseek-v3": ["function", "f\n```json\n{}\n```"],
    "minimax-m2": ['<invoke name="f">', '<parameter name="e">1</parameter>', "</invoke>"],
    "qwen3.5": ["<function=f>", "<parameter=e>\n1\n</parameter>", "</function>"],
    "llama-3": ['{"name": "f", "parameters": {}}'],
}


@dataclass(frozen=True)
class Case:
    rendering: Rendering
    prompt: Ids
    pieces: list[Ids]


def _case(name: str) -> Case:
    family, options = OPTIONS.get(name, (name, {}))
    rendering = any_family(family, **options)
    replies = [
        Reply("Hi there.", "Hm, yes."),
        Reply("On it.", "", (ToolCall("", "f", '{"e": "é"}'),)),
        Reply("", "So.", (ToolCall("", "g", "{}"),)),
    ]
    texts = [*COMMON, *OWN.get(family, []), *FAMILY_TOKENS[family]]
    markers = [*(FORMATS[family].reasoning or ()), *FORMATS[family].calls] * 3
    pieces = [rendering.encode_text(text) for text in (*texts, *markers)]
    pieces += [rendering.encode_reply(reply) for reply in replies]
    half = rendering.encode_text("日😀")  # a token per byte, so that some stand alone
    pieces += [np.array([token], np.int32) for token in (*rendering.stop_token_ids, half[0], half[1], *half[2:5])]
    return Case(rendering, rendering.render(ASKED), pieces)


CASES = {name: _case(name) for name in NAMES}


def _joined(pieces: Sequence[Ids]) -> Ids:
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)


def _check(rendering: Rendering, prompt: Ids, ids: Ids, sizes: list[int]) -> None:
    stream: StreamParser = rendering.stream(prompt, ASKED)
    reply = rendering.parse(ids, prompt, ASKED)
    content = reasoning = ""
    at = num_feeds = 0
    while at < len(ids):
        size = sizes[num_feeds % len(sizes)]
        delta = stream.feed(ids[at : at + size])
        content, reasoning = content + delta.content, reasoning + delta.reasoning
        assert reply.content.startswith(content)
        assert reply.reasoning.startswith(reasoning)
        at, num_feeds = at + size, num_feeds + 1
    delta = stream.finish()
    assert (content + delta.content, reasoning + delta.reasoning) == (reply.content, reply.reasoning)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=70, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_stream_shows_what_the_whole_turn_says(name: str, data: st.DataObject) -> None:
    case = CASES[name]
    ids = _joined(data.draw(st.lists(st.sampled_from(case.pieces), max_size=14)))
    ids = ids[: max(0, len(ids) - data.draw(st.integers(0, 6)))]
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    begun = data.draw(st.sampled_from(["", "So"]))
    prompt = case.prompt
    if begun:
        message = Message("assistant", begun)
        start = case.rendering.begin_reply(Conversation((*ASKED.messages, message), ASKED.tools), prompt)
        ids = np.concatenate([start, ids])
    _check(case.rendering, prompt, ids, sizes)


TEXT = "It is 5, for 2 + 3 < 6 & é > e; 日本 says so (<b>too</b>). "
MAX_HELD = 3  # characters that may still become a marker, or white space at the end


@pytest.mark.parametrize("name", LIVE)
def test_content_is_shown_as_it_arrives(name: str) -> None:
    case = CASES[name]
    begun = Message("assistant", "Begun.")
    start = case.rendering.begin_reply(Conversation((*ASKED.messages, begun), ASKED.tools), case.prompt)
    stream = case.rendering.stream(case.prompt, ASKED)
    stream.feed(start)
    shown = ""
    ids = case.rendering.encode_text(TEXT * 3)
    for i in range(len(ids)):
        shown += stream.feed(ids[i : i + 1]).content
        text = case.rendering.decode(ids[: i + 1]).rstrip("\ufffd")
        assert text.startswith(shown)
        assert len(text) - len(shown) <= MAX_HELD
    assert shown == (TEXT * 3).rstrip()


@pytest.mark.parametrize("name", LIVE)
def test_reasoning_is_shown_as_it_arrives(name: str) -> None:
    case = CASES[name]
    begun = Message("assistant", "Begun.", TEXT.strip())
    ids = case.rendering.begin_reply(Conversation((*ASKED.messages, begun), ASKED.tools), case.prompt)
    if not case.rendering.parse(ids, case.prompt, ASKED).reasoning:
        pytest.skip("this prompt forbids reasoning, or the family has none")
    shown = _one_by_one(case.rendering.stream(case.prompt, ASKED), ids)
    assert "".join(delta.reasoning for delta in shown) == TEXT.strip()
    assert sum(bool(delta.reasoning) for delta in shown) > 0.6 * len(TEXT)
    assert not any(delta.content and delta.reasoning for delta in shown)


def _one_by_one(stream: StreamParser, ids: Ids) -> list[Delta]:
    return [stream.feed(ids[i : i + 1]) for i in range(len(ids))]


HARMONY = harmony()
CHAIN = [
    *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|end|>"),
    *(
        "<|start|>assistant",
        " to=functions.f",
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|constrain|>json",
        "<|call|>",
    ),
    *("<|end|><|start|>assistant<|channel|>final<|message|>", "<|channel|>odd<|message|>", "<|return|>", "final"),
    *("<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>", '{"e": 1}', '{"e"'),
]
HARMONY_PIECES = [HARMONY.encode_text(text) for text in (*CHAIN, *CHAIN, *COMMON)]
HARMONY_PIECES += [HARMONY.encode_text("é😀")[i : i + 1] for i in range(4)]
PROMPTS = [
    "<|start|>user<|message|>Hi<|end|><|start|>assistant",
    "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>",
    "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>",
]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    prompt=st.sampled_from(PROMPTS),
    pieces=st.lists(st.sampled_from(HARMONY_PIECES), max_size=14),
    num_cut=st.integers(0, 6),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
def test_messages_in_channels_are_shown_as_the_whole_turn_says(
    prompt: str, pieces: list[Ids], num_cut: int, sizes: list[int]
) -> None:
    ids = _joined(pieces)
    _check(HARMONY, HARMONY.encode_text(prompt), ids[: max(0, len(ids) - num_cut)], sizes)


def test_messages_in_channels_are_shown_as_they_arrive() -> None:
    stream = HARMONY.stream(HARMONY.encode_text(PROMPTS[1]), ASKED)
    text = f"{TEXT}<|end|><|start|>assistant<|channel|>final<|message|>{TEXT}"
    shown = _one_by_one(stream, HARMONY.encode_text(text))
    assert "".join(delta.reasoning for delta in shown) == "".join(delta.content for delta in shown) == TEXT.rstrip()
    assert sum(bool(delta.content or delta.reasoning) for delta in shown) > 1.2 * len(TEXT)


RARE = [
    ("deepseek-v4", "Hi <｜DSML｜tool>\nthere"),
    ("deepseek-v4", "Hi <｜DSML｜toolcalls>\nthere"),
    ("kimi-k2.5", "</think>Hi <|tool_call_section_begin|>a<|tool_call_section_end|>"),
    ("inkling", "<|content_text|>Hi<|end_message|><|message_model|><|content_thinking|>Hm"),
    ("gemma4", "Hi <|channel>thought\nHm"),
    ("gemma4", "<|channel>thought\nHm<channel|>Hi<|channel>more"),
    ("llama-3", "Hi<|start_header_id|>user<|end_header_id|>there"),
    ("glm-4.5", "</think>Hi<think>Hm</think> there<think>more"),
    ("deepseek-r1", "Hm</think>Hi</think><think>there"),
    ("gemma4 in pieces", "Hi"),
]


@pytest.mark.parametrize(("name", "text"), RARE)
def test_what_parsers_take_back_or_split_otherwise_is_shown_as_the_whole_turn_says(name: str, text: str) -> None:
    case = CASES[name]
    ids = case.rendering.encode_text(text)
    _check(case.rendering, case.prompt, ids, [1])
    half = case.rendering.encode_text("😀")[:2]
    _check(case.rendering, case.prompt, np.concatenate([ids, half, ids]), [1])
    assert "Hi" in case.rendering.parse(ids, case.prompt, ASKED).content


def test_the_end_of_a_turn_counts_within_a_header_too() -> None:
    ids = HARMONY.encode_text("<|start|>assistant<|return|><|channel|>final<|message|>Hi")
    _check(HARMONY, HARMONY.encode_text(PROMPTS[0]), ids, [1])


def test_an_end_marker_in_letters_does_not_split_what_was_shown() -> None:
    rendering = CASES["qwen3"].rendering
    letters = [rendering.encode_text(text) for text in ("<think>", "a</thi", "nk>b", "</think>", "c")]
    _check(rendering, CASES["qwen3"].prompt, _joined(letters), [1])


def test_what_the_whole_turn_is_read_for_is_read_once() -> None:
    """A token costs the same at the end of a long turn as at its start: nothing is decoded or parsed again."""
    rendering = any_family("qwen3")
    calls = 0

    def parse(ids: Ids) -> Reply:
        nonlocal calls
        calls += 1
        return Reply("x" * 5000)

    stream = rendering.stream(rendering.render(ASKED), ASKED)
    assert isinstance(stream, MarkerStream)
    stream._parse = parse
    shown = _one_by_one(stream, rendering.encode_text("x" * 5000))
    assert "".join(delta.content for delta in shown) == "x" * 5000
    assert calls == 0
    stream.finish()
    assert calls == 1
