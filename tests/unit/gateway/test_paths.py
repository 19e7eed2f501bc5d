"""A request is judged on its normalised path."""

from __future__ import annotations

import pytest

from stenograph.gateway.paths import Target, is_generation, read


@pytest.mark.parametrize(
    ("raw", "target"),
    [
        ("/v1/models", Target(None, "/v1/models")),
        ("/s/steno_1/v1/chat/completions?beta=true", Target("steno_1", "/v1/chat/completions")),
        ("/s/steno_1//v1/./chat/completions/", Target("steno_1", "/v1/chat/completions")),
        ("/s/steno_1/../steno_2/v1/models", Target("steno_2", "/v1/models")),
        ("/s/steno_1/v1/%2e%2e/%2E%2E/steno_2/v1/models", Target("steno_2", "/v1/models")),
        ("//v1%2Fchat%2Fcompletions", Target(None, "/v1/chat/completions")),
        ("/", Target(None, "/")),
        ("/../..", Target(None, "/")),
    ],
)
def test_paths_are_normalised_before_they_are_judged(raw: str, target: Target) -> None:
    assert read(raw) == target


def test_generation_is_one_post() -> None:
    assert is_generation("POST", "/v1/chat/completions")
    assert not is_generation("GET", "/v1/chat/completions")
    assert not is_generation("POST", "/v1/chat/completions/x")
    assert not is_generation("POST", "/v1/completions")
