"""Tokenizers and templates for tests: the built-in bytes, the packaged model's, and templates that misbehave."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from renderers.gpt_oss import GptOssRenderer
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from stenograph.config import ModelConfig
from stenograph.rendering import Rendering, builtin_tokenizer, load_rendering
from stenograph.rendering.family import FamilyRendering
from stenograph.rendering.loading import family_rendering

EXAMPLE_TEMPLATE = Path(__file__).parents[2] / "examples" / "arithmetic" / "chat_template.jinja"

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def family(**options: object) -> Rendering:
    """The Qwen3 family over the built-in tokenizer."""
    return load_rendering(ModelConfig.model_validate(options))


def pieces_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that decodes as Gemma's do: printable ASCII and a few other characters, bytes for the rest."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "é", *map(chr, range(0x21, 0x7F))]
    core = Tokenizer(
        models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True, unk_token=None)
    )
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token=None, clean_up_tokenization_spaces=False)


@cache
def any_family(name: str, *, think_tokens: bool = True, pieces: bool = False, **options: bool) -> FamilyRendering:
    """A family of `renderers` over the built-in tokenizer with the special tokens that it wants besides."""
    tokenizer = pieces_tokenizer() if pieces else builtin_tokenizer()
    if not think_tokens:
        tokenizer = builtin_tokenizer(["<|im_start|>"])
    tokenizer.add_special_tokens({"extra_special_tokens": FAMILY_TOKENS[name]}, replace_extra_special_tokens=False)
    return family_rendering(tokenizer, {"name": name, **options}, ModelConfig())


def harmony() -> FamilyRendering:
    """gpt-oss, which parses but does not render: it renders with a vocabulary of its own that is downloaded."""
    tokens = {"_start": "<|start|>", "_end": "<|end|>", "_return": "<|return|>", "_call": "<|call|>"}
    tokens |= {"_channel": "<|channel|>", "_message": "<|message|>", "_constrain": "<|constrain|>"}
    tokenizer = builtin_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": list(tokens.values())}, replace_extra_special_tokens=False)
    renderer = object.__new__(GptOssRenderer)
    setattr(renderer, "_tokenizer", tokenizer)  # noqa: B010
    for name, token in tokens.items():
        setattr(renderer, name, tokenizer.convert_tokens_to_ids(token))
    return FamilyRendering(tokenizer, renderer, None, "gpt-oss")


def tagged_family() -> Rendering:
    """A family whose calls are tags."""
    return any_family("qwen3.5", enable_thinking=False)


def template(text: str, folder: Path, **options: object) -> Rendering:
    """A rendering by the Jinja source `text` over the built-in tokenizer."""
    file = folder / "chat_template.jinja"
    file.write_text(text)
    return load_rendering(ModelConfig.model_validate({"chat_template": file, **options}))


def example(**options: object) -> Rendering:
    """The example's template over the built-in tokenizer."""
    return load_rendering(ModelConfig.model_validate({"chat_template": EXAMPLE_TEMPLATE, **options}))


def any_arguments(folder: Path) -> Rendering:
    """The example's template for a model whose calls hold whatever stands where their arguments belong."""
    call = {
        "open_pattern": r'<tool_call>\n\{"name": "(?P<name>\w+)", "arguments": ',
        "close": "}\n</tool_call>",
        "content": "text",
        "content_args": {"strip": False},
        "repeats": True,
        "transform": {"name": "{name}", "arguments": "{content}"},
    }
    fields = {"content": {"content": "text"}, "tool_calls": call}
    file = folder / "response_schema.json"
    file.write_text(json.dumps({"start_anchor": "<|im_start|>assistant\n", "fields": fields}))
    return example(response_schema=file)


_VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_ARGUMENTS = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
_GLM = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", *_ARGUMENTS]
_LAGUNA = ["〈|EOS|〉", "<assistant>", "</assistant>"]
_DEEPSEEK = [
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
]
_KIMI = [
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
]
# What each family looks up in its tokenizer, beyond what the built-in one has; gpt-oss is `harmony`.
FAMILY_TOKENS: dict[str, list[str]] = {
    "qwen3": [],
    "prime-qwen3": [],
    "qwen3-vl": _VISION,
    "qwen3.5": _VISION,
    "qwen3.6": _VISION,
    "qwen3.8": _VISION,
    "nemotron-3": [],
    "nemotron-3-ultra": [],
    "nemotron-3.5": [],
    "glm-4.5": _GLM,
    "glm-5": _GLM,
    "glm-5.1": _GLM,
    "glm-5.3": _GLM,
    "minimax-m2": ["]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"],
    "laguna-xs.2": _LAGUNA,
    "laguna-m.1": _LAGUNA,
    "laguna-xs-2.1": _LAGUNA,
    "laguna-s-2.1": _LAGUNA,
    "hy3": [
        *("<｜hy_begin_of_sentence:opensource｜>", "<｜hy_eos:opensource｜>", "<｜hy_User:opensource｜>"),
        *("<｜hy_Assistant:opensource｜>", "<｜reasoning_mode:opensource｜>"),
        *(f"<{end}{tag}:opensource>" for tag in ("think", "tool_calls", "tool_call") for end in ("", "/")),
        *("<tool_sep:opensource>", "<arg_key:opensource>", "</arg_key:opensource>"),
        *("<arg_value:opensource>", "</arg_value:opensource>"),
        *(f"<{end}{tag}:opensource>" for tag in ("tool_responses", "tool_response") for end in ("", "/")),
    ],
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "deepseek-v4": [
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"),
        *(
            "｜DSML｜",
            "<｜action｜>",
            "<｜query｜>",
            "<｜authority｜>",
            "<｜domain｜>",
            "<｜title｜>",
            "<｜read_url｜>",
        ),
    ],
    "kimi-k2": _KIMI,
    "kimi-k2.5": [*_KIMI, "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"],
    "gemma4": [
        *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"),
        *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|image>", "<|image|>", "<image|>"),
    ],
    "inkling": [
        *("<|message_user|>", "<|message_model|>", "<|message_system|>", "<|message_tool|>", "<|content_text|>"),
        *("<|content_thinking|>", "<|content_image|>", "<|content_audio_input|>", "<|content_xml|>"),
        *("<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>", "<|content_model_end_sampling|>"),
        *("<|end_message|>", "<|audio_end|>", "<|unused_200054|>", "<|unused_200053|>"),
    ],
    "llama-3": [
        *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
        "<|eom_id|>",
    ],
}
