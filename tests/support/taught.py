"""A tiny model that has learnt one conversation by heart, so that a real engine answers with a real tool call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from stenograph.config import ModelConfig
from stenograph.rendering import Rendering, builtin_tokenizer, load_rendering
from stenograph.types import Conversation, Ids, Message, Reply, Tool, ToolCall
from support.models import tiny_model

ARGUMENTS = '{"a": 1.0e0,  "b":2}'
TOOL = Tool("add", "", {"type": "object", "properties": {}})
ASKED = Message("user", "1+2?")
RESULT = Message("tool", "3", tool_call_id="", name="add")
THANKS = Message("user", "thanks")
REPLIES = (Reply("Well.", tool_calls=(ToolCall("", "add", ARGUMENTS),)), Reply("It is 3."), Reply("Bye."))
NEW_MESSAGES = ((ASKED,), (RESULT,), (THANKS,))


def conversation_ids(rendering: Rendering) -> tuple[Ids, np.ndarray]:
    """The whole conversation as the gateway records it, and which ids the model has to write."""
    ids = np.empty(0, np.int32)
    spans: list[tuple[int, int]] = []
    messages: tuple[Message, ...] = ()
    output = ids
    for reply, new in zip(REPLIES, NEW_MESSAGES, strict=True):
        conversation = Conversation((*messages, *new), (TOOL,))
        if not spans:
            ids = rendering.render(conversation)
        else:
            start = len(ids) - len(output)
            added = rendering.extend(conversation, len(messages), ids[:start], output)
            assert added is not None
            ids = np.concatenate([ids, added])
        output = rendering.encode_reply(reply)
        spans.append((len(ids), len(ids) + len(output)))
        ids = np.concatenate([ids, output])
        messages = (*conversation.messages, reply.message())
    mask = np.zeros(len(ids), bool)
    for start, end in spans:
        mask[start:end] = True
    return ids, mask


def save_taught_model(folder: Path) -> None:
    """Train for a few seconds until every token of the conversation is all but certain; save with its tokenizer."""
    ids, mask = conversation_ids(load_rendering(ModelConfig(renderer="qwen3", thinking_retention="all")))
    model = tiny_model(len(builtin_tokenizer()), context_length=1024, initializer_range=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    tokens = torch.from_numpy(ids).long()[None]
    written = torch.from_numpy(mask)[1:]
    least = -torch.inf
    with torch.random.fork_rng():
        for _ in range(400):
            logprobs = model(tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
            chosen = logprobs.gather(1, tokens[0, 1:, None])[:, 0][written]
            least = chosen.min().item()
            if least > -0.004:
                break
            optimizer.zero_grad()
            (-chosen.mean()).backward()
            optimizer.step()
    assert least > -0.01, f"the conversation was not learnt: {least:.3f}"
    model.save_pretrained(folder)
    builtin_tokenizer().save_pretrained(folder)
