"""Turns made by hand, for tests of the record."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np

from stenograph.types import Conversation, Message, Reply, Sampling, Tool, Turn

_numbers = count()


def user(text: str) -> Message:
    return Message("user", text)


def make_turn(
    context: Sequence[int],
    output: Sequence[int],
    *,
    asked: Sequence[Message] = (),
    said: str = "",
    sampling: Sampling | None = None,
    versions: tuple[tuple[int, int], ...] = ((0, 0),),
    tools: tuple[Tool, ...] = (),
) -> Turn:
    return Turn(
        id=f"turn_{next(_numbers)}",
        context_ids=np.array(context, np.int32),
        output_ids=np.array(output, np.int32),
        rollout_logprobs=-np.arange(1, len(output) + 1, dtype=np.float32),
        versions=versions if output else (),
        finish_reason="stop",
        ended_by="eos",
        sampling=sampling or Sampling(),
        logprobs_mode="raw",
        messages=tuple(asked),
        tools=tools,
        reply=Reply(said),
    )


def asking(*texts: str, tools: tuple[Tool, ...] = ()) -> Conversation:
    """A conversation of texts: user, assistant, user, ..."""
    roles = ("user", "assistant")
    return Conversation(tuple(Message(roles[n % 2], text) for n, text in enumerate(texts)), tools)
