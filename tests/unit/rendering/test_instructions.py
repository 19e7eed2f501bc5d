"""System messages in any position reach the prompt, in order, and a later turn still extends the recorded one."""

from __future__ import annotations

import numpy as np
import pytest

from stenograph.rendering import Rendering
from stenograph.types import Conversation, Message
from support.tokenizers import CHATML, FAMILY_TOKENS, any_family, template

LATER = "m.role == 'system' and not loop.first"
FIRST_ONLY = CHATML.replace(
    "{{- '<", "{%- if " + LATER + " %}{{ raise_exception('system first') }}{%- endif %}{{- '<", 1
)
DROPS_LATER = CHATML.replace("{{- '<", "{%- if not (" + LATER + ") %}{{- '<", 1)
DROPS_LATER = DROPS_LATER.replace("{%- endfor %}", "{%- endif %}{%- endfor %}")
MOVES = (
    "{%- for m in messages if m.role == 'system' %}{{- '<|im_start|>system\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor %}" + CHATML.replace("in messages", "in messages if m.role != 'system'")
)
TEMPLATES = {"chatml": CHATML, "first only": FIRST_ONLY, "drops later": DROPS_LATER, "moves": MOVES}
SYSTEM = [Message("system", f"Rule {name}.") for name in "abcde"]
CASES = [
    [SYSTEM[0], Message("developer", "Rule b."), Message("user", "Q1")],
    [SYSTEM[0], Message("user", "Q1"), SYSTEM[1]],
    [SYSTEM[0], SYSTEM[1], Message("user", "Q1"), SYSTEM[2], SYSTEM[3]],
    [Message("user", "Q1"), SYSTEM[0]],
]


@pytest.fixture(scope="module", params=[*FAMILY_TOKENS, *TEMPLATES])
def rendering(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    if request.param in FAMILY_TOKENS:
        return any_family(request.param)
    return template(TEMPLATES[request.param], tmp_path_factory.mktemp("template"))


def _in_order(text: str, messages: list[Message]) -> bool:
    places = [text.find(message.content) for message in messages]
    return places[0] >= 0 and places == sorted(set(places)) and places[-1] + 2 < len(text)


@pytest.mark.parametrize("asked", CASES)
@pytest.mark.parametrize("new", [[SYSTEM[4], Message("user", "Q2")], [Message("user", "Q2"), SYSTEM[4]], [SYSTEM[4]]])
def test_every_instruction_is_there_and_turns_extend(
    rendering: Rendering, asked: list[Message], new: list[Message]
) -> None:
    prompt = rendering.render(Conversation(tuple(asked)))
    assert _in_order(rendering.decode(prompt), asked)
    answer = Message("assistant", "A1")
    begun = rendering.begin_reply(Conversation((*asked, answer)), prompt)
    output = np.append(begun, np.int32(rendering.stop_token_ids[0]))
    conversation = Conversation((*asked, answer, *new))
    whole = rendering.decode(rendering.render(conversation))
    assert _in_order(whole, [*asked, answer, *new])
    added = rendering.extend(conversation, len(asked) + 1, prompt, output)
    assert added is not None
    # One family's own template writes a line break behind an answer that its bridge leaves out.
    assert whole.endswith(rendering.decode(added).lstrip("\n"))
    assert all(message.content in rendering.decode(added) for message in new)


def test_a_renderer_that_takes_instructions_anywhere_gets_them_as_they_are() -> None:
    text = any_family("qwen3").decode(any_family("qwen3").render(Conversation(tuple(CASES[2]))))
    assert text.count("<|im_start|>system\n") == 4


def test_one_that_takes_a_single_one_gets_the_first_ones_joined_and_later_ones_as_the_users() -> None:
    text = any_family("qwen3.5").decode(any_family("qwen3.5").render(Conversation(tuple(CASES[2]))))
    assert text.startswith("<|im_start|>system\nRule a.\n\nRule b.<|im_end|>\n<|im_start|>user\nQ1<|im_end|>\n")
    assert "<|im_start|>user\nRule c.<|im_end|>\n<|im_start|>user\nRule d.<|im_end|>\n" in text


def test_an_instruction_that_goes_as_the_users_ends_the_tool_cycle_as_a_question_does() -> None:
    rendering = any_family("qwen3.5")
    asked = Conversation((Message("user", "Q1"),))
    prompt = rendering.render(asked)
    output = rendering.encode_text("I think.\n</think>\n\nA1<|im_end|>")
    answer = Message("assistant", "A1", "I think.")
    conversation = Conversation((*asked.messages, answer, SYSTEM[0]))
    assert rendering.extend(conversation, 2, prompt, output) is None
    assert "I think" not in rendering.decode(rendering.render(conversation))
