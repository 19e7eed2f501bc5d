"""Tokenizers and templates for tests: the built-in bytes, the packaged model's, and templates that misbehave."""

from __future__ import annotations

from pathlib import Path

from renderers import Qwen35RendererConfig, create_renderer

from stenograph.config import ModelConfig
from stenograph.rendering import Rendering, builtin_tokenizer, load_rendering
from stenograph.rendering.family import FamilyRendering

EXAMPLE_TEMPLATE = Path(__file__).parents[2] / "examples" / "arithmetic" / "chat_template.jinja"

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def family(**options: object) -> Rendering:
    """The Qwen3 family over the built-in tokenizer."""
    return load_rendering(ModelConfig.model_validate(options))


def tagged_family() -> Rendering:
    """A family whose calls are tags: Qwen3.5 over the built-in tokenizer with the tokens that it wants besides."""
    tokenizer = builtin_tokenizer()
    tokenizer.add_special_tokens(
        {"extra_special_tokens": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]},
        replace_extra_special_tokens=False,
    )
    renderer = create_renderer(tokenizer, Qwen35RendererConfig(enable_thinking=False))
    return FamilyRendering(tokenizer, renderer, None, "qwen3.5")


def template(text: str, folder: Path, **options: object) -> Rendering:
    """A rendering by the Jinja source `text` over the built-in tokenizer."""
    file = folder / "chat_template.jinja"
    file.write_text(text)
    return load_rendering(ModelConfig.model_validate({"chat_template": file, **options}))


def example(**options: object) -> Rendering:
    """The example's template over the built-in tokenizer."""
    return load_rendering(ModelConfig.model_validate({"chat_template": EXAMPLE_TEMPLATE, **options}))
