"""Conversation <-> token ids: the `renderers` library, and a verified bridge for any other chat template."""

from stenograph.rendering.base import Delta, Rendering, StreamParser
from stenograph.rendering.loading import load_rendering
from stenograph.rendering.tokenizer import builtin_tokenizer, load_tokenizer

__all__ = ["Delta", "Rendering", "StreamParser", "builtin_tokenizer", "load_rendering", "load_tokenizer"]
