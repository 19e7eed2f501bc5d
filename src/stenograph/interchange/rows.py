"""A row is one selected branch of a session, and holds whatever the branch is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NotRequired, TypedDict

import numpy as np
import orjson

from stenograph.config import SelectConfig
from stenograph.traces.selection import DEFAULT
from stenograph.traces.session import SessionRecord
from stenograph.traces.trace import Output, TraceTree
from stenograph.types import BranchRole, EndedBy, FinishReason, LogprobsMode, Message, Role, Sample, Turn, TurnSpan


class Called(TypedDict):
    name: str
    arguments: str  # as the model wrote them


class CallRow(TypedDict):
    id: str
    type: str
    function: Called


class MessageRow(TypedDict):
    """A message of chat completions; `turn` names the turn that sampled it."""

    role: Role
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallRow]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    turn: NotRequired[str]


class ToolRow(TypedDict):
    name: str
    description: str
    parameters: str  # JSON


class TurnRow(TypedDict):
    """Whose output ids[start:end] is, and how it was sampled."""

    turn: str
    start: int
    end: int
    role: BranchRole
    role_evidence: str
    ended_by: EndedBy
    finish_reason: FinishReason
    stopped_by: str | None
    sampling: dict[str, Any]  # every field of Sampling
    temperature: float
    top_p: float
    logprobs_mode: LogprobsMode
    accepted: list[str]
    notes: list[str]
    started_s: float
    seconds: float


class ExpertsRow(TypedDict):
    """Routed experts: `data` is the array in C order, little-endian; `mask` is 1 where they are known."""

    dtype: str
    shape: list[int]
    data: bytes
    mask: Any  # uint8[tokens]


class Row(TypedDict):
    """The columns, in their order. Arrays are NumPy's, an entry a token."""

    session: str
    branch: int
    role: BranchRole
    rollout_id: str | None
    group_id: str | None
    task_id: str | None
    reward: float | None
    status: str | None
    ids: Any  # int32
    loss_mask: Any  # uint8
    rollout_logprobs: Any  # float32
    versions: Any  # int32
    experts: ExpertsRow | None
    turns: list[TurnRow]
    messages: list[MessageRow]
    tools: list[ToolRow]
    metadata: str  # JSON


def session_rows(record: SessionRecord, select: SelectConfig = DEFAULT) -> Iterator[Row]:
    """The branches that the session was settled by, else those that `select` chooses, oldest first.

    Raises TraceError where a branch cannot be flattened.
    """
    for sample in record.samples(select):
        yield _row(sample, record)


def _row(sample: Sample, record: SessionRecord) -> Row:
    tree, last = record.tree, sample.turns[-1].turn
    return Row(
        session=sample.session,
        branch=sample.branch,
        role=sample.role,
        rollout_id=_name(sample.rollout_id),
        group_id=_name(sample.group_id),
        task_id=_name(sample.task_id),
        reward=sample.reward,
        status=record.status,
        ids=sample.ids,
        loss_mask=sample.loss_mask.astype(np.uint8),
        rollout_logprobs=sample.rollout_logprobs,
        versions=sample.versions,
        experts=_experts(sample),
        turns=[_turn(span, tree.turn(span.turn)) for span in sample.turns],
        messages=_messages(tree, last),
        tools=[ToolRow(name=t.name, description=t.description, parameters=_json(t.parameters)) for t in tree.turn(last).tools],
        metadata=_json(record.opening.metadata),
    )


def _name(value: object) -> str | None:
    """A name as text: metadata may hold a number in its place."""
    return None if value is None else str(value)


def _experts(sample: Sample) -> ExpertsRow | None:
    """The passes that something in the row was sampled from; that over its last id is none of them."""
    if sample.experts is None or sample.experts_mask is None:
        return None
    known = sample.experts_mask.copy()
    known[-1:] = False
    experts = np.where(known[:, None, None], sample.experts, 0).astype(sample.experts.dtype.newbyteorder("<"))
    return ExpertsRow(
        dtype=sample.experts.dtype.name, shape=list(experts.shape), data=experts.tobytes(), mask=known.astype(np.uint8)
    )


def _turn(span: TurnSpan, turn: Turn) -> TurnRow:
    return TurnRow(
        turn=span.turn,
        start=span.start,
        end=span.end,
        role=turn.role,
        role_evidence=turn.role_evidence,
        ended_by=span.ended_by,
        finish_reason=turn.finish_reason,
        stopped_by=turn.stopped_by,
        sampling={**asdict(turn.sampling), "stop": list(turn.sampling.stop)},
        temperature=span.temperature,
        top_p=span.top_p,
        logprobs_mode=span.logprobs_mode,
        accepted=list(turn.accepted),
        notes=list(turn.notes),
        started_s=turn.started_s,
        seconds=turn.seconds,
    )


def _messages(tree: TraceTree, last: str) -> list[MessageRow]:
    """What was said up to `last`'s reply. Only replies get a mark: an id that a client sent back is none."""
    sampled: dict[int, str] = {}
    output: Output | None = tree.node(last)
    while output is not None:
        sampled[output.num_messages - 1] = output.turn.id
        output = output.before
    rows = [_message(message) for message in tree.said(last)]
    for place, turn in sampled.items():
        rows[place]["turn"] = turn
    return rows


def _message(message: Message) -> MessageRow:
    """Empty fields are left out."""
    row = MessageRow(role=message.role, content=message.content)
    if message.reasoning:
        row["reasoning_content"] = message.reasoning
    if message.tool_calls:
        row["tool_calls"] = [
            CallRow(id=call.id, type="function", function=Called(name=call.name, arguments=call.arguments))
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        row["tool_call_id"] = message.tool_call_id
    if message.name:
        row["name"] = message.name
    return row


def _json(value: object) -> str:
    return orjson.dumps(value).decode()
