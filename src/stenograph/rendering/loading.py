"""Which rendering a config means: a family by name, the family of a known model, or the model's own chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from stenograph.config import ModelConfig
from stenograph.errors import ConfigError
from stenograph.rendering.base import Rendering
from stenograph.rendering.tokenizer import load_tokenizer, plain_tokenizer

if TYPE_CHECKING:
    from renderers import Renderer
    from transformers import PreTrainedTokenizerBase

    from stenograph.rendering.family import FamilyRendering
    from stenograph.rendering.tokenizer import AnyTokenizer

# These renderers ask of their tokenizer where its tokens stand in a text, and where it does not say, they decode each
# beginning of the text to find out; one of the user's own may ask anything.
_ASK_MORE = frozenset({"deepseek-v4", "hy3", "laguna-xs-2.1", "laguna-s-2.1", "custom"})


def load_rendering(config: ModelConfig) -> Rendering:
    """The rendering of `config`'s model; without a model, the built-in tokenizer under the Qwen3 family.

    Raises ConfigError where the renderer is unknown or does not fit the tokenizer, or where there is no template.
    """
    tokenizer = load_tokenizer(config)
    options = _renderer_options(config)
    if options is None:
        return _template_rendering(tokenizer, config)
    return family_rendering(tokenizer, options, config)


def family_rendering(
    tokenizer: PreTrainedTokenizerBase, options: dict[str, Any], config: ModelConfig
) -> FamilyRendering:
    """The family that `options` ({name, options...}) names, over `tokenizer`. Raises ConfigError where it won't fit."""
    from stenograph.rendering.family import FamilyRendering

    given = tokenizer if options["name"] in _ASK_MORE else plain_tokenizer(tokenizer)
    renderer, retaining = _create_renderers(given, options, config)
    return FamilyRendering(tokenizer, renderer, retaining, options["name"])


def _template_rendering(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> Rendering:
    from stenograph.rendering.response import ResponseReader, load_schema
    from stenograph.rendering.template import TemplateRendering

    if not tokenizer.chat_template:
        raise ConfigError(
            f"model.chat_template: {config.path} has none of its own; set it to a Jinja file, or set model.renderer "
            "to the model's family"
        )
    reader = ResponseReader(tokenizer, load_schema(config.response_schema))
    return TemplateRendering(tokenizer, reader, config.thinking_retention)


def _renderer_options(config: ModelConfig) -> dict[str, Any] | None:
    """{name, options...} of the family to use; None for the chat template."""
    from renderers.base import MODEL_RENDERER_MAP

    given = config.renderer
    options: dict[str, Any] = {"name": given} if isinstance(given, str) else dict(given or {"name": "auto"})
    if options.get("name") == "default":
        return None
    if options.get("name") != "auto":
        return options
    if config.chat_template is not None:
        return None
    name = "qwen3" if config.path is None else MODEL_RENDERER_MAP.get(config.path)
    return {**options, "name": name} if name is not None else None


def _create_renderers(
    tokenizer: AnyTokenizer, options: dict[str, Any], config: ModelConfig
) -> tuple[Renderer, Renderer | None]:
    """The renderer, and under "tool_cycle" its twin that retains all reasoning (None where its options forbid it)."""
    if config.thinking_retention == "all":
        return _create_renderer(tokenizer, {**options, "thinking_retention": "all"}), None
    renderer = _create_renderer(tokenizer, options)
    if config.thinking_retention == "template":
        return renderer, None
    # A family whose template never drops reasoning derives "all", which keeps more than "tool_cycle" asks for.
    if getattr(renderer, "effective_thinking_retention", None) == "template":
        renderer = _create_renderer(tokenizer, {**options, "thinking_retention": "tool_cycle"})
    try:
        return renderer, _create_renderer(tokenizer, {**options, "thinking_retention": "all"})
    except ConfigError:
        return renderer, None


def _create_renderer(tokenizer: AnyTokenizer, options: dict[str, Any]) -> Renderer:
    from renderers import RendererConfig, create_renderer

    adapter: TypeAdapter[Any] = TypeAdapter(RendererConfig)
    try:
        return create_renderer(tokenizer, adapter.validate_python(options))
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(x) for x in first["loc"])
        raise ConfigError(
            f"model.renderer: {where + ': ' if where else ''}{first['msg']}, got {first['input']!r}; "
            "give the name of a family in `renderers`, or {name, options}"
        ) from e
    except (AssertionError, ValueError, TypeError, KeyError, ImportError) as e:
        raise ConfigError(
            f"model.renderer: {options.get('name')!r} does not fit this model: {e}; set model.renderer to the "
            "model's family or model.chat_template to a Jinja file"
        ) from e
