"""How the families of `renderers` mark the parts of a turn: what is listed here streams, what is not is buffered."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """Markers are single tokens; where a tokenizer has no token for the reasoning, they are read as letters.

    `header` is what stands before a turn. `calls` begin what only the whole turn explains. `spelled` markers do so
    too, and are letters (or letters around a token). `rescinds`: tokens that make the family's parser take back text
    before them; where a model writes one, that one and the rest are text. `reopens`: reasoning may come again after
    content, and its end marker is never text. `set_by_config`: not the prompt but the renderer's option says whether
    the turn begins with reasoning. `channels`: reasoning is sought in the whole prompt, not only where the turn begins.
    `bare_call`: a turn that begins as a JSON object may be a call.
    """

    header: str
    reasoning: tuple[str, str] = ("<think>", "</think>")
    calls: tuple[str, ...] = ("<tool_call>",)
    spelled: tuple[str, ...] = ()
    rescinds: tuple[str, ...] = ()
    reopens: bool = False
    set_by_config: bool = False
    channels: bool = False
    bare_call: bool = False


_CHATML = Format("<|im_start|>assistant\n")
_GLM = Format("<|assistant|>", reopens=True, set_by_config=True)
_LAGUNA = Format("<assistant>")
_DEEPSEEK = Format("<｜Assistant｜>", calls=("<｜tool▁calls▁begin｜>",))
_KIMI = Format("<|im_assistant|>assistant<|im_middle|>", calls=("<|tool_calls_section_begin|>",))

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
        calls=(),
        spelled=(
            *("<｜DSML｜tool_calls>", "<｜DSML｜toolcalls>", "<｜DSML｜tool>", "<｜DSML｜invoke", "</｜DSML｜invoke>"),
            "</｜DSML｜tool_calls>",
        ),
        reopens=True,
    ),
    "kimi-k2": _KIMI,
    "kimi-k2.5": Format(
        _KIMI.header, calls=_KIMI.calls, spelled=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    ),
    "gemma4": Format(
        "<|turn>model\n",
        reasoning=("<|channel>", "<channel|>"),
        calls=("<|tool_call>",),
        channels=True,
    ),
    "inkling": Format("<|message_model|>", reasoning=("<|content_thinking|>", "<|end_message|>"), channels=True),
    "llama-3": Format(
        "<|start_header_id|>assistant<|end_header_id|>\n\n", calls=(), rescinds=("<|end_header_id|>",), bare_call=True
    ),
}
