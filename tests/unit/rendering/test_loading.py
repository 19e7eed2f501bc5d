"""From a config to a rendering, and what is said where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stenograph.config import ModelConfig
from stenograph.errors import ConfigError, RequestError
from stenograph.rendering import builtin_tokenizer, load_rendering
from stenograph.types import Conversation, Message, Tool, ToolCall
from support.tokenizers import CHATML, EXAMPLE_TEMPLATE, example, family, template

ASKED = Conversation((Message("user", "héllo 😀"),))


def test_without_a_model_the_built_in_tokenizer_speaks_qwen3() -> None:
    rendering = load_rendering(ModelConfig())
    ids = rendering.render(ASKED)
    assert ids.dtype == np.int32
    assert rendering.decode(ids) == "<|im_start|>user\nhéllo 😀<|im_end|>\n<|im_start|>assistant\n"
    np.testing.assert_array_equal(ids, load_rendering(ModelConfig()).render(ASKED))
    assert rendering.decode(np.array(rendering.stop_token_ids)) == "<|im_end|><|endoftext|>"


def test_loading_imports_no_torch() -> None:
    code = (
        "import sys; from stenograph.config import ModelConfig; from stenograph.rendering import load_rendering; "
        "load_rendering(ModelConfig()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_chat_template_file_replaces_the_family_unless_a_renderer_is_named() -> None:
    text = "<|im_start|>user\nhéllo 😀<|im_end|>\n<|im_start|>assistant\n"
    for rendering in (example(), example(renderer="qwen3")):
        assert rendering.decode(rendering.render(ASKED)) == text
    assert type(example()) is not type(example(renderer="qwen3"))


@pytest.mark.parametrize(
    ("options", "field", "remedy"),
    [
        ({"renderer": "qwen33"}, "model.renderer", "qwen3"),
        ({"renderer": {"name": "qwen3", "enable_thinkin": False}}, "model.renderer", "enable_thinkin"),
        ({"renderer": "glm-4.5"}, "model.renderer", "set model.renderer"),
        ({"renderer": "default"}, "model.chat_template", "set it to a Jinja file"),
        ({"chat_template": Path("/no/such.jinja")}, "model.chat_template", "Jinja file"),
        ({"chat_template": EXAMPLE_TEMPLATE, "response_schema": EXAMPLE_TEMPLATE}, "model.response_schema", "JSON"),
    ],
)
def test_errors_name_the_field_and_the_remedy(options: dict[str, object], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_rendering(ModelConfig.model_validate(options))
    assert str(caught.value).startswith(field)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_renders_no_answer_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template.*no answers"):
        template("{{ raise_exception('no answers') }}", tmp_path)


def test_messages_that_a_template_refuses_are_the_agents_error(tmp_path: Path) -> None:
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    rendering = template(CHATML + refusal, tmp_path)
    with pytest.raises(RequestError, match="no system"):
        rendering.render(Conversation((Message("system", "s"), Message("user", "q"))))


def test_a_template_that_takes_objects_gets_them(tmp_path: Path) -> None:
    values = "m.tool_calls | default([]) | map(attribute='function.arguments.a') | join"
    rendering = template(CHATML.replace("m.content +", f"m.content + ({values}) +"), tmp_path)
    call = Message("assistant", "", tool_calls=(ToolCall("1", "f", '{"a": 7}'),))
    text = rendering.decode(rendering.render(Conversation((*ASKED.messages, call))))
    assert "<|im_start|>assistant\n7<|im_end|>" in text


def test_instructions_of_a_developer_and_tools_reach_the_prompt() -> None:
    tool = Tool("calc", "Evaluate.", {"type": "object", "properties": {"e": {"type": "string"}}})
    conversation = Conversation((Message("developer", "Be brief."), *ASKED.messages), (tool,))
    for rendering in (family(), example()):
        text = rendering.decode(rendering.render(conversation))
        assert "<|im_start|>system\nBe brief.\n" in text
        assert '"calc"' in text


def test_the_example_prompt_is_short() -> None:
    tool = Tool("calc", "Evaluate.", {"type": "object", "properties": {"e": {"type": "string"}}})
    rendering = example()
    text = rendering.decode(rendering.render(Conversation(ASKED.messages, (tool,))))
    assert text.startswith("<|im_start|>system\nTools:\n")
    assert text.count("<|im_start|>") == 3
    assert len(text) < 330


def test_the_built_in_tokenizer_keeps_any_text() -> None:
    tokenizer = builtin_tokenizer()
    text = " a . b 's  \t\n<think>é日😀\x00</think> n't"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.unk_token is None
    assert tokenizer.eos_token == "<|im_end|>"


def test_no_text_has_fewer_tokens_than_its_longest_token_allows() -> None:
    rendering = load_rendering(ModelConfig())
    text = "<tool_response>" * 3 + "日本 text"
    assert rendering.longest_token == len("</tool_response>")
    assert len(rendering.encode_text(text)) >= len(text) / rendering.longest_token
