"""docs/models.md says of each family what the code does."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from renderers.base import MODEL_RENDERER_MAP
from renderers.configs import RendererConfig

from stenograph.rendering.family import FamilyRendering
from stenograph.types import Conversation, Message, Reply, Tool, ToolCall
from support.tokenizers import FAMILY_TOKENS, any_family, harmony

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
ARGUMENTS = '{"e" :  "é"}'
ASKED = Conversation(
    (Message("user", "q"),), (Tool("f", "", {"type": "object", "properties": {"e": {"type": "string"}}}),)
)


def _rows() -> dict[str, list[str]]:
    lines = [line.strip("|\n").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells}


def _names() -> set[str]:
    union = get_args(get_args(RendererConfig)[0])
    names = {name for config in union for name in get_args(config.model_fields["name"].annotation)}
    return names - {"auto", "default", "custom"}


def _arguments(name: str, rendering: FamilyRendering) -> str:
    """Whether a call's arguments come back as they were written, where the family writes JSON."""
    if name == "gpt-oss":
        prompt = rendering.encode_text("<|start|>assistant")
        text = f"<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
    else:
        prompt = rendering.render(ASKED)
        text = rendering.decode(rendering.encode_reply(Reply(tool_calls=(ToolCall("", "f", '{"e": "é"}'),))))
        text = text.replace('{"e": "é"}', ARGUMENTS).replace('{"e":"é"}', ARGUMENTS)
    (call,) = rendering.parse(rendering.encode_text(text), prompt, ASKED).tool_calls
    return "as written" if call.arguments == ARGUMENTS else "compact"


def test_every_family_has_a_row_and_no_other() -> None:
    assert set(_rows()) == _names()


@pytest.mark.parametrize("name", sorted({*FAMILY_TOKENS, "gpt-oss"}))
def test_a_row_says_what_the_code_does(name: str) -> None:
    _, live, instructions, arguments = _rows()[name]
    rendering = any_family(name) if name in FAMILY_TOKENS else harmony()
    assert live == ("live" if rendering.streams else "buffered")
    assert arguments == _arguments(name, rendering)
    if name != "gpt-oss":
        placement = rendering._placement
        done = ["first ones joined"] * placement.merged + ["later ones as the user's"] * placement.as_user
        assert instructions == (", ".join(done) or "as they are")


def test_the_models_named_are_those_that_a_family_is_chosen_for() -> None:
    rows = _rows()
    for model, name in MODEL_RENDERER_MAP.items():
        assert model.split("/")[0] in rows[name][0], model
