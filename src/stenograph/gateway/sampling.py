"""From what an agent asks to how a turn is sampled: forced, asked, default, in this order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stenograph.config import SamplingConfig
from stenograph.engines.base import Capabilities
from stenograph.errors import ContextOverflow
from stenograph.types import Sampling

MIN_TEMPERATURE = 0.01  # below it logits divided by it leave float32; 0 itself is greedy


def resolve(
    asked: Mapping[str, Any], config: SamplingConfig, capabilities: Capabilities, num_prompt: int
) -> tuple[Sampling, tuple[str, ...]]:
    """The sampling to use, every value explicit, and notes on what differs from what was asked.

    Raises ContextOverflow where the prompt leaves no room for a single token.
    """
    room = capabilities.context_length - num_prompt
    if room < 1:
        raise ContextOverflow(num_prompt, capabilities.context_length)
    forced = config.force.model_dump(exclude_none=True)
    values = config.default.model_dump(exclude_none=True) | dict(asked) | forced
    notes = [f"forced:{name}" for name in forced if name in asked and asked[name] != forced[name]]
    if "seed" in asked and not capabilities.seeded:
        notes.append("ignored:seed")
    if 0 < values.get("temperature", 1) < MIN_TEMPERATURE:
        values["temperature"] = MIN_TEMPERATURE
        notes.append("clamped:temperature")
    limit = min(config.max_tokens, room)
    if values.get("max_tokens", 0) > limit:
        notes.append("clamped:max_tokens")
    values["max_tokens"] = min(values.get("max_tokens", limit), limit)
    return Sampling(**values), tuple(notes)
