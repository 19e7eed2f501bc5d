"""Turns of any shape: whatever a protocol, an engine or a client may put into one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
from hypothesis import strategies as st

from stenograph.types import BranchRole, EndedBy, FinishReason, Message, Reply, Role, Sampling, Tool, ToolCall, Turn

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["é🙂\n", "\0", '"\\', "\u2028"]
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
CALLS = st.lists(st.builds(ToolCall, TEXTS, TEXTS, TEXTS), max_size=3).map(tuple)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(get_args(Role)),
    content=TEXTS,
    reasoning=TEXTS,
    tool_calls=CALLS,
    tool_call_id=st.none() | TEXTS,
    name=st.none() | TEXTS,
    turn=st.none() | TEXTS,
    joints=st.lists(st.integers(0, 99), max_size=3).map(tuple),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
TOOLS = st.builds(Tool, TEXTS, TEXTS, st.dictionaries(TEXTS, JSON, max_size=3))
SAMPLINGS = st.builds(
    Sampling,
    temperature=FLOATS,
    top_p=FLOATS,
    top_k=st.integers(0, 2**31),
    min_p=FLOATS,
    presence_penalty=FLOATS,
    frequency_penalty=FLOATS,
    repetition_penalty=FLOATS,
    max_tokens=st.integers(1, 2**40),
    stop=st.lists(TEXTS, max_size=3).map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),  # as big as a request can say
    constrained=st.booleans(),
)
REPLIES = st.builds(Reply, TEXTS, TEXTS, CALLS, st.integers(0, 9))


def any_array(kind: Any, values: st.SearchStrategy[Any]) -> st.SearchStrategy[np.ndarray]:
    """In one piece or with gaps."""
    held = st.lists(values, max_size=6).map(lambda of: np.array(of, kind))
    return held | held.map(lambda array: np.repeat(array, 2)[::2])


@st.composite
def any_turns(draw: st.DrawFn) -> Turn:
    output_ids = draw(any_array(np.int32, st.integers(-(2**31), 2**31 - 1)))
    logprobs = st.floats(width=32, allow_nan=False)
    return Turn(
        id=draw(TEXTS),
        context_ids=draw(any_array(np.int32, st.integers(-(2**31), 2**31 - 1))),
        output_ids=output_ids,
        rollout_logprobs=np.array([draw(logprobs) for _ in output_ids], np.float32),
        versions=draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 2**40)), max_size=3).map(tuple)),
        finish_reason=draw(st.sampled_from(get_args(FinishReason))),
        ended_by=draw(st.sampled_from(get_args(EndedBy))),
        sampling=draw(SAMPLINGS),
        logprobs_mode=draw(st.sampled_from(["raw", "processed"])),
        messages=draw(st.lists(MESSAGES, max_size=3).map(tuple)),
        tools=draw(st.lists(TOOLS, max_size=2).map(tuple)),
        reply=draw(REPLIES),
        extends=draw(st.booleans()),
        role=draw(st.sampled_from(get_args(BranchRole))),
        role_evidence=draw(TEXTS),
        accepted=draw(st.lists(TEXTS, max_size=3).map(tuple)),
        notes=draw(st.lists(TEXTS, max_size=3).map(tuple)),
        stopped_by=draw(st.none() | TEXTS),
        started_s=draw(FLOATS),
        seconds=draw(FLOATS),
        client_session=draw(st.none() | TEXTS),
        num_instructions=draw(st.none() | st.integers(0, 9)),
    )


@st.composite
def any_families(draw: st.DrawFn) -> tuple[Turn, Turn]:
    """A turn and one that goes on from it, which has some values of it."""
    parent, turn = draw(any_turns()), draw(any_turns())
    names = ("sampling", "tools", "versions", "role", "notes", "accepted", "client_session", "num_instructions")
    same = draw(st.sets(st.sampled_from(names)))
    return parent, replace(turn, **{name: getattr(parent, name) for name in same})
