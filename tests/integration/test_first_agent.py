"""A real client, a real gateway process, a real engine: what is trained on is what was sampled, to the last digit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from stenograph.config import ModelConfig
from stenograph.rendering import load_rendering
from support.models import fresh_logprobs
from support.serving import Server, serving
from support.taught import ARGUMENTS, conversation_ids, save_taught_model

ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taught")
    save_taught_model(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    settings = ("model.renderer=qwen3", "model.thinking_retention=all")
    with serving("--model", str(folder), *(word for setting in settings for word in ("--set", setting))) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_and_a_local_engine_leave_an_exact_sample(server: Server, folder: Path, stream: bool) -> None:
    session = server.open(metadata={"task_id": "t"})
    client = server.client(session)
    messages: list[Any] = [{"role": "user", "content": "1+2?"}]

    def turn() -> Any:
        answer: Any = client.chat.completions.create(model="m", messages=messages, tools=[ADD], stream=stream)
        message = join(answer) if stream else answer.choices[0].message.model_dump(exclude_none=True)
        messages.append(message)
        return message

    called = turn()
    (call,) = called["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("add", ARGUMENTS)
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})
    assert turn()["content"] == "It is 3."
    messages.append({"role": "user", "content": "thanks"})
    assert turn()["content"] == "Bye."

    server.call("POST", f"/sessions/{session['id']}/seal", {"reward": 1.0})
    (sample,) = server.call("GET", f"/sessions/{session['id']}/samples")
    assert server.call("GET", f"/sessions/{session['id']}/drift") == []
    expected, written = conversation_ids(load_rendering(ModelConfig(renderer="qwen3", thinking_retention="all")))
    assert sample["ids"] == expected.tolist()
    assert np.array_equal(np.array(sample["loss_mask"], bool), written)

    model = AutoModelForCausalLM.from_pretrained(folder)
    fresh = fresh_logprobs(model, expected[:1], expected[1:])
    recorded = np.array(sample["rollout_logprobs"], np.float32)
    assert np.abs(recorded[1:][written[1:]] - fresh[written[1:]]).max() < 1e-4
    assert not recorded[~written].any()

    assert server.call("DELETE", f"/sessions/{session['id']}") == {"released": [session["id"]]}
    assert server.refused("GET", f"/sessions/{session['id']}/samples")[0] == 404


def join(stream: Any) -> dict[str, Any]:
    """The message of a streamed answer, as an agent would put it together."""
    content, calls = "", []
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            calls += [call.model_dump(exclude={"index"}, exclude_none=True) for call in choice.delta.tool_calls or []]
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
