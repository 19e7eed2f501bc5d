"""A reply that the agent has begun: the model goes on in the middle of it, and both are one text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stenograph.errors import RequestError
from stenograph.rendering import Rendering
from stenograph.types import Conversation, Ids, Message, Tool, ToolCall
from support.tokenizers import CHATML, FAMILY_TOKENS, any_family, example, template

TOOLS = (Tool("f", "Do.", {"type": "object", "properties": {"e": {"type": "string"}}}),)
ASKED = (Message("system", "Be brief."), Message("user", "2 + 3?"))
FORCED = CHATML.replace("'<|im_start|>assistant\\n' }}{%- endif", "'<|im_start|>assistant\\n<think>\\n' }}{%- endif")


@pytest.fixture(scope="module", params=[*FAMILY_TOKENS, "example", "chatml", "forced"])
def rendering(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    if request.param in FAMILY_TOKENS:
        return any_family(request.param)
    if request.param == "example":
        return example()
    return template(FORCED if request.param == "forced" else CHATML, tmp_path_factory.mktemp("template"))


def _begin(rendering: Rendering, *messages: Message, begun: Message) -> tuple[Conversation, Ids, Ids]:
    asked = Conversation(messages)
    prompt = rendering.render(asked)
    return asked, prompt, rendering.begin_reply(Conversation((*messages, begun)), prompt)


def _joined(rendering: Rendering, asked: Conversation, prompt: Ids, begun: Ids, output: Ids) -> tuple[str, str]:
    stream = rendering.stream(prompt, asked)
    shown = [stream.feed(begun), *(stream.feed(output[i : i + 1]) for i in range(len(output))), stream.finish()]
    return "".join(delta.content for delta in shown), "".join(delta.reasoning for delta in shown)


@pytest.mark.parametrize("prefill", ["The answer", "{", "  é:\n\n1.", "x"])
@pytest.mark.parametrize("said", [" is 5.", "\n\n  5", "5"])
def test_what_was_begun_and_what_is_sampled_are_one_content(rendering: Rendering, prefill: str, said: str) -> None:
    asked, prompt, begun = _begin(rendering, *ASKED, begun=Message("assistant", prefill))
    output = np.append(rendering.encode_text(said), np.int32(rendering.stop_token_ids[0]))
    text = prefill.lstrip() + said
    reply = rendering.parse(np.concatenate([begun, output]), prompt, asked)
    assert (reply.content, reply.reasoning, reply.tool_calls) == (text, "", ())
    assert _joined(rendering, asked, prompt, begun, output) == (text, "")


def test_reasoning_that_comes_with_it_stands_before_it_where_the_prompt_opened_some(rendering: Rendering) -> None:
    asked, prompt, begun = _begin(rendering, *ASKED, begun=Message("assistant", "The", reasoning="Hm."))
    reply = rendering.parse(np.concatenate([begun, rendering.encode_text(" answer")]), prompt, asked)
    assert reply.content == "The answer"
    assert reply.reasoning in ("Hm.", "")
    assert reply.reasoning == "Hm." or not rendering.decode(prompt).rstrip().endswith("<think>")


def test_after_a_tool_result_too(rendering: Rendering) -> None:
    call = Message("assistant", "", tool_calls=(ToolCall("c1", "f", '{"e": "1"}'),))
    asked, prompt, begun = _begin(
        rendering, *ASKED, call, Message("tool", "5", tool_call_id="c1"), begun=Message("assistant", "So")
    )
    reply = rendering.parse(np.concatenate([begun, rendering.encode_text(" 5.")]), prompt, asked)
    assert reply.content == "So 5."


@pytest.mark.parametrize("ended", [True, False])
def test_the_next_turn_continues_what_was_begun(rendering: Rendering, ended: bool) -> None:
    _, prompt, begun = _begin(rendering, *ASKED, begun=Message("assistant", "The"))
    output = rendering.encode_text(" answer.")
    if ended:
        output = np.append(output, np.int32(rendering.stop_token_ids[0]))
    known = (*ASKED, Message("assistant", "The answer."))
    conversation = Conversation((*known, Message("user", "again?")))
    added = rendering.extend(conversation, len(known), np.concatenate([prompt, begun]), output)
    as_sampled = rendering.extend(conversation, len(known), prompt, np.concatenate([begun, output]))
    assert added is not None
    assert as_sampled is not None
    np.testing.assert_array_equal(added, as_sampled)
    text = rendering.decode(added)
    assert "again?" in text
    assert rendering.decode(rendering.render(conversation)).endswith(text[text.index("again?") :])


def test_retention_by_template_counts_what_was_begun(tmp_path: Path) -> None:
    rendering = template(CHATML, tmp_path, thinking_retention="template")
    _, prompt, begun = _begin(rendering, *ASKED, begun=Message("assistant", "The"))
    output = rendering.encode_text(" answer.<|im_end|>")
    known = (*ASKED, Message("assistant", "The answer."))
    conversation = Conversation((*known, Message("user", "again?")))
    assert rendering.extend(conversation, len(known), np.concatenate([prompt, begun]), output) is not None
    assert rendering.extend(conversation, len(known), prompt, output) is None


def test_what_cannot_be_gone_on_with_is_refused(rendering: Rendering) -> None:
    prompt = rendering.render(Conversation(ASKED))
    calls = Message("assistant", "So", tool_calls=(ToolCall("c1", "f", "{}"),))
    for last in (calls, replace(calls, role="user", tool_calls=())):
        with pytest.raises(RequestError, match=r"can(not)? be continued"):
            rendering.begin_reply(Conversation((*ASKED, last)), prompt)
