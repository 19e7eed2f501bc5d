"""Forced, asked, default, in this order; what differs from what was asked is noted."""

from __future__ import annotations

import pytest

from stenograph.config import SamplingConfig, SamplingValues
from stenograph.engines.base import Capabilities
from stenograph.errors import ContextOverflow
from stenograph.gateway.sampling import resolve

ENGINE = Capabilities(context_length=100, logprobs_mode="raw")
CONFIG = SamplingConfig(
    force=SamplingValues(temperature=1.0), default=SamplingValues(top_p=0.9, temperature=0.5), max_tokens=50
)


def test_force_overrides_and_default_fills() -> None:
    sampling, notes = resolve({"temperature": 0.2, "min_p": 0.1}, CONFIG, ENGINE, 10)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (1.0, 0.9, 0.1)
    assert notes == ("forced:temperature",)


def test_limits_are_clamped_to_the_configured_and_to_the_room_left() -> None:
    assert resolve({}, CONFIG, ENGINE, 10)[0].max_tokens == 50
    assert resolve({"max_tokens": 5}, CONFIG, ENGINE, 10)[0].max_tokens == 5
    sampling, notes = resolve({"max_tokens": 128_000}, CONFIG, ENGINE, 80)
    assert (sampling.max_tokens, notes) == (20, ("clamped:max_tokens",))


def test_overflow_is_a_prompt_without_room() -> None:
    assert resolve({}, CONFIG, ENGINE, 99)[0].max_tokens == 1
    with pytest.raises(ContextOverflow):
        resolve({}, CONFIG, ENGINE, 100)


def test_a_temperature_next_to_nothing_is_clamped_and_none_is_greedy() -> None:
    plain = SamplingConfig()
    sampling, notes = resolve({"temperature": 1e-40}, plain, ENGINE, 1)
    assert (sampling.temperature, notes) == (0.01, ("clamped:temperature",))
    assert resolve({"temperature": 0.0}, plain, ENGINE, 1)[0].temperature == 0


def test_a_seed_that_the_engine_cannot_keep_is_noted() -> None:
    assert resolve({"seed": 1}, CONFIG, ENGINE, 1)[1] == ("ignored:seed",)
