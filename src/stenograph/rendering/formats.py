"""How the families of `renderers` mark the parts of a turn: what is listed here streams, what is not is buffered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stenograph.rendering.stream import Grammar, State

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Format:
    """Every marker is one token, except in `spelled`.

    `header` is what the generation prompt writes before a turn. From a call's marker on, only the whole turn tells what
    is what; `spelled` markers do the same in letters (or letters around a token). `lead`: what begins the reasoning
    and is none. `text` begins content, in a format where every part has a marker and the end marker of reasoning
    ends content too. `rescinds`: a marker in content that makes the family's parser take back what stands before it;
    where a model writes it, it and the rest are text. `reopens`: reasoning may come again after content. `by_option`:
    the renderer's option, not the prompt, says whether a turn begins with reasoning. `in_channels`: a prompt may open
    reasoning anywhere in the turn. `bare_call`: a turn that begins like a JSON object may be a call.
    """

    header: str
    reasoning: tuple[str, str] | None = _THINK
    calls: tuple[str, ...] = ()
    spelled: tuple[str, ...] = ()
    lead: str = ""
    text: str | None = None
    rescinds: str | None = None
    reopens: bool = False
    by_option: bool = False
    in_channels: bool = False
    bare_call: bool = False
    named_ids: bool = False


_CHATML = Format("<|im_start|>assistant\n", calls=("<tool_call>",))
_GLM = Format("<|assistant|>", calls=("<tool_call>",), reopens=True, by_option=True)
_LAGUNA = Format("<assistant>", calls=("<tool_call>",))
_DEEPSEEK = Format("<｜Assistant｜>", calls=("<｜tool▁calls▁begin｜>",))
_KIMI_HEADER = "<|im_assistant|>assistant<|im_middle|>"
_KIMI_CALLS = ("<|tool_calls_section_begin|>",)

FORMATS: dict[str, Format] = {
    "qwen3": _CHATML,
    "prime-qwen3": _CHATML,
    "qwen3-vl": _CHATML,
    "qwen3.5": _CHATML,
    "qwen3.6": _CHATML,
    "qwen3.8": _CHATML,
    "nemotron-3": _CHATML,
    "nemotron-3-ultra": _CHATML,
    "nemotron-3.5": _CHATML,
    "glm-4.5": _GLM,
    "glm-5": _GLM,
    "glm-5.1": _GLM,
    "glm-5.3": _GLM,
    "minimax-m2": Format("]~b]ai\n", calls=("<minimax:tool_call>",)),
    "laguna-xs.2": _LAGUNA,
    "laguna-m.1": _LAGUNA,
    "laguna-xs-2.1": _LAGUNA,
    "laguna-s-2.1": _LAGUNA,
    "hy3": Format(
        "<｜hy_Assistant:opensource｜>",
        reasoning=("<think:opensource>", "</think:opensource>"),
        calls=("<tool_calls:opensource>", "<tool_call:opensource>"),
    ),
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "deepseek-v4": Format(
        "<｜Assistant｜>",
        spelled=("<｜DSML｜tool_calls>", "<｜DSML｜toolcalls>", "<｜DSML｜tool>", "<｜DSML｜invoke"),
        reopens=True,
    ),
    "kimi-k2": Format(_KIMI_HEADER, calls=_KIMI_CALLS, named_ids=True),
    "kimi-k2.5": Format(
        _KIMI_HEADER, calls=_KIMI_CALLS, spelled=(*_KIMI_CALLS, "<|tool_call_section_begin|>"), named_ids=True
    ),
    "gemma4": Format(
        "<|turn>model\n",
        reasoning=("<|channel>", "<channel|>"),
        calls=("<|tool_call>",),
        lead="thought\n",
        rescinds="<|channel>",
        in_channels=True,
    ),
    "inkling": Format(
        "<|message_model|>",
        reasoning=("<|content_thinking|>", "<|end_message|>"),
        calls=("<|content_invoke_tool_json|>",),
        text="<|content_text|>",
        in_channels=True,
    ),
    "llama-3": Format(
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        reasoning=None,
        rescinds="<|end_header_id|>",
        bare_call=True,
    ),
}


def build_grammar(form: Format, tokenizer: PreTrainedTokenizerBase, stop: tuple[int, ...], *, thinks: bool) -> Grammar:
    """`form` in the ids of `tokenizer`. `thinks` is false where an option makes the markers of reasoning text."""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    def tokens(*markers: str) -> list[int]:
        return [ids[0] for ids in map(encode, markers) if len(ids) == 1]

    stops = dict.fromkeys(stop, State.HELD)
    held = stops | dict.fromkeys(tokens(*form.calls), State.HELD)
    start, reasoning, content, between = dict(held), dict(held), dict(held), dict(stops)
    starts = ("{",) if form.bare_call else ()
    header = encode(form.header)[0]
    reasoning_markers = form.reasoning if thinks and form.reasoning is not None else ()
    markers = tokens(*reasoning_markers)
    if form.text is not None:
        opens, closes = markers
        start = stops | {opens: State.REASONING, tokens(form.text)[0]: State.CONTENT, closes: State.BETWEEN}
        between = start | {header: State.START}
        reasoning[closes] = State.BETWEEN
        content = stops | {closes: State.BETWEEN}
    elif len(markers) == 2:
        opens, closes = markers
        start[opens] = State.REASONING
        reasoning[closes] = State.CONTENT
        if not form.in_channels:
            reasoning[opens] = State.REASONING
        if form.reopens:
            start[closes] = State.CONTENT
            content |= {opens: State.REASONING, closes: State.CONTENT}
    else:
        starts += reasoning_markers[:1]
    if form.rescinds is not None:
        content |= dict.fromkeys(tokens(form.rescinds), State.RESCINDED)
        start = dict.fromkeys(tokens(form.rescinds), State.RESCINDED) | start
    states = {State.START: start, State.REASONING: reasoning, State.CONTENT: content, State.BETWEEN: between}
    return Grammar(
        states,
        header,
        starts=starts,
        spelled=form.spelled,
        end="" if form.reopens or form.in_channels else "".join(reasoning_markers[1:]),
        lead=form.lead,
        lead_ids=encode(form.lead) if form.lead else (),
        after_space=not form.lead,
        bare_text=form.text is None,
        joins=not form.reopens,
        in_letters=len(markers) < len(reasoning_markers),
    )
