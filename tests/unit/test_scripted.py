"""The script's order: one cursor per session, triggers outside of it, faults in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stenograph.config import ModelConfig
from stenograph.engines.base import Generate
from stenograph.engines.scripted import ScriptedEngine, load_script
from stenograph.errors import ConfigError, EngineError
from stenograph.rendering import load_rendering
from stenograph.types import Conversation, Message, Sampling
from support.serving import write_script

RENDERING = load_rendering(ModelConfig())


def engine(tmp_path: Path, *lines: dict[str, object]) -> ScriptedEngine:
    write_script(tmp_path / "script.jsonl", *lines)
    return ScriptedEngine(load_script(tmp_path / "script.jsonl", RENDERING))


async def said(engine: ScriptedEngine, session: str = "s", last: str = "", max_tokens: int = 99) -> str:
    conversation = Conversation((Message("user", last),))
    sampling = Sampling(max_tokens=max_tokens)
    request = Generate(np.arange(3, dtype=np.int32), sampling, session, conversation=conversation)
    chunks = [chunk async for chunk in engine.generate(request)]
    ids = np.concatenate([chunk.ids for chunk in chunks])
    return RENDERING.parse(ids, request.ids, Conversation((Message("user", "x"),))).content


async def test_each_session_has_its_cursor(tmp_path: Path) -> None:
    script = engine(tmp_path, {"content": "one"}, {"content": "two"})
    assert [await said(script, "a"), await said(script, "b"), await said(script, "a")] == ["one", "one", "two"]
    with pytest.raises(EngineError, match="script exhausted"):
        await said(script, "a")


async def test_a_faulted_line_uses_up_its_place(tmp_path: Path) -> None:
    script = engine(tmp_path, {"fault": "error"}, {"content": "then"})
    with pytest.raises(EngineError):
        await said(script)
    assert await said(script) == "then"


async def test_triggers_stand_outside_of_the_order(tmp_path: Path) -> None:
    script = engine(tmp_path, {"content": "in order"}, {"when": "hi", "content": "hello", "once": True})
    assert await said(script, last="hi there") == "hello"
    assert await said(script, last="hi there") == "in order"


async def test_a_message_that_no_line_is_for_is_quoted(tmp_path: Path) -> None:
    script = engine(tmp_path, {"when": "hi", "content": "hello"})
    with pytest.raises(EngineError, match="no `when` line matches the last message, 'good day'") as caught:
        await said(script, last="good day")
    assert "turns are used" not in str(caught.value)
    with pytest.raises(EngineError, match=r"'x{80}\.\.\.'"):
        await said(script, last="x" * 1000)


async def test_past_the_end_both_ways_to_go_on_are_named(tmp_path: Path) -> None:
    script = engine(tmp_path, {"content": "in order"}, {"when": "hi", "content": "hello", "once": True})
    await said(script)
    await said(script, last="hi")
    with pytest.raises(EngineError, match="all 1 turns are used, and no `when` line matches the last message, 'hi'"):
        await said(script, last="hi")


async def test_text_is_given_as_it_is_and_length_cuts(tmp_path: Path) -> None:
    script = engine(tmp_path, {"text": "x <|im_end|>"}, {"text": "abcdef<|im_end|>"})
    assert await said(script) == "x"
    assert await said(script, max_tokens=3) == "abc"


async def test_a_line_ends_at_a_newline_alone(tmp_path: Path) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text('{"content": "a\u2028b"}\n', encoding="utf-8")
    assert await said(ScriptedEngine(load_script(path, RENDERING))) == "a\u2028b"


BAD_LINES = [
    ("{", "not JSON"),
    ("[]", "not an object"),
    ('{"contents": "x"}', "contents"),
    ('{"fault": "explode"}', "explode"),
    ('{"fault": "slow:x"}', "slow:x"),
    ('{"finish_reason": "bored"}', "bored"),
    ('{"fault": "slow:inf"}', "slow:inf"),
    ('{"tool_calls": [{"nam": "f"}]}', "tool_calls"),
    ('{"tool_calls": [{"name": 3, "arguments": {}}]}', "every name"),
    ('{"content": 3}', "content must be"),
    ('{"reasoning": ["x"]}', "reasoning must be"),
    ('{"text": 3}', "text must be"),
    ('{"when": 3}', "when must be"),
    ("", "empty"),
]


@pytest.mark.parametrize(("line", "named"), BAD_LINES, ids=[named for _, named in BAD_LINES])
def test_a_bad_line_is_named(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match="script") as caught:
        load_script(path, RENDERING)
    assert named in str(caught.value)
