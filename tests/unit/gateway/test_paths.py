"""A request is judged on its normalised path."""

from __future__ import annotations

import pytest

from stenograph.gateway.paths import Target, is_generation, meant, read


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


@pytest.mark.parametrize(
    ("path", "address"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/messages", "/v1/messages"),
        ("/models", "/v1/models"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/v1/messages", None),
        ("/v1/completions", None),
        ("/v1", None),
        ("/", None),
        ("/tokenize", None),
    ],
)
def test_an_address_whose_v1_is_forgotten_or_doubled_is_known(path: str, address: str | None) -> None:
    assert meant(path) == address
