"""What an engine sends is passed on while it is sound; what an agent began or a stop string cut is kept apart."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.engines.base import Chunk
from stenograph.errors import EngineError, EngineUnavailable
from stenograph.gateway.output import Output, checked
from stenograph.rendering.base import Delta
from stenograph.types import Conversation, FinishReason, Message, Sampling
from support.listening import rendering

RENDERING = rendering()
ASKED = Conversation((Message("user", "hello"),))


def chunk(
    *ids: int, finish: FinishReason | None = None, logprobs: int | None = None, experts: int | None = None
) -> Chunk:
    numbers = np.full(len(ids) if logprobs is None else logprobs, -0.5, np.float32)
    routed = None if experts is None else np.zeros((experts, 2, 2), np.uint8)
    return Chunk(np.array(ids, np.int32), numbers, 0, finish, routed)


async def passed(*chunks: Chunk, max_tokens: int = 10, experts: bool = False) -> list[Chunk]:
    async def sent() -> AsyncGenerator[Chunk, None]:
        for one in chunks:
            yield one

    return [one async for one in checked(sent(), max_tokens, experts)]


async def test_a_sound_answer_passes_and_nothing_after_its_end() -> None:
    sound = (chunk(1), chunk(2, 3), chunk(4, finish="stop"))
    assert await passed(*sound) == list(sound)
    assert await passed(*sound, chunk(5)) == list(sound)
    routed = (chunk(1, experts=3), chunk(2, experts=1), chunk(finish="length", experts=0))  # 2 rows of the prompt
    assert len(await passed(*routed, experts=True)) == 3


@pytest.mark.parametrize(
    ("chunks", "told"),
    [
        ([], "without a finish reason"),
        ([chunk(1)], "without a finish reason"),
        ([chunk(1, 2, logprobs=1)], "1 logprobs for 2 tokens"),
        ([chunk(1, logprobs=2)], "2 logprobs for 1 tokens"),
        ([chunk(*range(11))], "11 tokens, 10 were asked"),
    ],
)
async def test_an_unsound_answer_is_an_error(chunks: list[Chunk], told: str) -> None:
    with pytest.raises(EngineError, match=told):
        await passed(*chunks)


@pytest.mark.parametrize(("highest", "dtype"), [(7, np.uint8), (255, np.uint8), (256, np.uint16), (70_000, np.int32)])
def test_experts_take_no_more_room_than_they_need(highest: int, dtype: type) -> None:
    output = Output(RENDERING, RENDERING.render(ASKED), ASKED, Sampling(), lambda _: None)
    for number in (0, highest):
        routed = np.full((1, 2, 2), number, np.int64)
        output.take(Chunk(np.array([65], np.int32), np.zeros(1, np.float32), 0, None, routed))
    experts = output.experts
    assert experts is not None
    assert (experts.dtype, experts[:, 0, 0].tolist()) == (dtype, [0, highest])


def test_tokens_that_come_one_by_one_take_little_more_room_than_they_need() -> None:
    output = Output(RENDERING, RENDERING.render(ASKED), ASKED, Sampling(), lambda _: None)
    output.take(chunk(65))
    tracemalloc.start()
    try:
        for _ in range(2000):
            output.take(chunk(65))
        assert tracemalloc.get_traced_memory()[0] < 50 * 2000  # an id is kept twice, beside a log-probability and text
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("experts", [None, 1, 3])
async def test_experts_that_are_wanted_must_be_there(experts: int | None) -> None:
    with pytest.raises(EngineError, match=f"{experts or 0} rows of routed experts for 2 tokens"):
        await passed(chunk(0, experts=1), chunk(1, 2, finish="stop", experts=experts), experts=True)


async def test_an_abort_is_no_end() -> None:
    with pytest.raises(EngineUnavailable):
        await passed(chunk(1), chunk(finish="abort"))


def play(text: str, cuts: list[int], **options: Any) -> tuple[str, Any]:
    """Feed `text` in pieces; what was shown, and how it ended."""
    shown: list[Delta] = []
    prompt = RENDERING.render(ASKED)
    sampling = Sampling(stop=options.pop("stop", ()))
    output = Output(RENDERING, prompt, ASKED, sampling, shown.append, **options)
    ids = RENDERING.encode_text(text)
    marks = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    for start, end in pairwise(marks):
        if output.take(chunk(*ids[start:end].tolist(), finish="stop" if end == len(ids) else None)):
            break
    finished = output.finish()
    return "".join(delta.content for delta in shown), finished


CUTS = st.lists(st.integers(0, 200), max_size=6)


@given(CUTS)
def test_a_stop_string_ends_what_is_shown_wherever_the_pieces_end(cuts: list[int]) -> None:
    shown, finished = play("say EN END more END<|im_end|>", cuts, stop=("END", "never"))
    assert (shown, finished.shown.content, finished.reply.content) == ("say EN ",) * 3
    assert (finished.finish_reason, finished.ended_by) == ("stop", "stop")


@given(CUTS)
def test_what_only_looks_like_a_stop_string_is_shown(cuts: list[int]) -> None:
    shown, finished = play("say EN<|im_end|>", cuts, stop=("END",))
    assert (shown, finished.ended_by, finished.notes) == ("say EN", "eos", ())


@given(CUTS)
def test_a_prefill_and_the_output_are_one_text(cuts: list[int]) -> None:
    begun = Message("assistant", "The answer")
    conversation = Conversation((*ASKED.messages, begun), continues=True)
    begun_ids = RENDERING.begin_reply(conversation, RENDERING.render(ASKED))
    for text, said in ((" is 5.<|im_end|>", " is 5."), ("s are 5.<|im_end|>", "s are 5."), ("<|im_end|>", "")):
        shown, finished = play(text, cuts, begun=begun, begun_ids=begun_ids)
        assert (shown, finished.shown.content) == (said, said)
        assert finished.reply.content == "The answer" + said
        assert finished.notes == ()
    spaced = Message("assistant", "The answer ")
    conversation = Conversation((*ASKED.messages, spaced), continues=True)
    begun_ids = RENDERING.begin_reply(conversation, RENDERING.render(ASKED))
    for text, said in ((" is 5.<|im_end|>", " is 5."), ("<|im_end|>", "")):
        shown, finished = play(text, cuts, begun=spaced, begun_ids=begun_ids)
        assert (shown, finished.reply.content, finished.notes) == (said, "The answer " + said, ())
    # A stop string counts from where the model goes on.
    begun_ids = RENDERING.begin_reply(Conversation((*ASKED.messages, begun)), RENDERING.render(ASKED))
    shown, finished = play(" is 5.<|im_end|>", cuts, begun=begun, begun_ids=begun_ids, stop=("answer", "5"))
    assert (shown, finished.reply.content) == (" is ", "The answer is ")


MARKED = "<think>\nplan it\n</think>\n\nThe answer is 42, of course.<|im_end|>"


@given(st.integers(0, len(MARKED) - 10), CUTS)
def test_nothing_of_the_models_own_is_taken_for_what_was_begun(at: int, cuts: list[int]) -> None:
    """What is begun may hold the family's own markers: then it is read as something else than the text that it is."""
    begun = Message("assistant", MARKED[:at].rstrip())
    rest = MARKED[len(begun.content) :]
    begun_ids = RENDERING.encode_text(begun.content)
    prompt = RENDERING.render(ASKED)
    ids = RENDERING.encode_text(rest)
    read = RENDERING.parse(begun_ids, prompt, ASKED)
    said = RENDERING.parse(np.concatenate([begun_ids, ids]), prompt, ASKED)
    shown, finished = play(rest, cuts, begun=begun, begun_ids=begun_ids)
    assert said.content.startswith(read.content)
    assert shown == finished.shown.content == said.content[len(read.content) :]
    assert finished.shown.reasoning == said.reasoning[len(read.reasoning) :]
    assert finished.reply.content == begun.content + shown
    assert finished.notes == ()


def test_a_call_that_was_begun_is_no_text_to_take_off() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    begun = Message("assistant", text[:25])
    shown, finished = play(text[25:] + "<|im_end|>", [], begun=begun, begun_ids=RENDERING.encode_text(text[:25]))
    assert (shown, [call.name for call in finished.shown.tool_calls], finished.notes) == ("", ["f"], ())


def test_a_call_that_does_not_parse_is_noted() -> None:
    bad = '<tool_call>\n{"name": "f", "argum\n</tool_call>'
    shown, finished = play(bad + "<|im_end|>", [])
    assert (shown, finished.notes) == (bad, ("malformed_call",))


@pytest.mark.parametrize(("arguments", "notes"), [('{"a": 1}', ()), ('"{bad"', ("malformed_arguments",))])
def test_arguments_that_are_no_object_are_noted(arguments: str, notes: tuple[str, ...]) -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call><|im_end|>'
    _, finished = play(text, [])
    assert (len(finished.reply.tool_calls), finished.notes) == (1, notes)
