"""A row is one selected branch of a session, and holds whatever the branch is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import cast

import numpy as np
import orjson

from stenograph.config import SelectConfig
from stenograph.interchange.columns import MessageRow, Row, ToolRow, TurnRow
from stenograph.interchange.experts import experts_row
from stenograph.traces.export import message_row
from stenograph.traces.payloads import Read
from stenograph.traces.selection import DEFAULT
from stenograph.traces.session import SessionRecord
from stenograph.traces.trace import Output, TraceTree
from stenograph.types import Sample, Tool, Turn, TurnSpan


def session_rows(record: SessionRecord, read: Read, select: SelectConfig = DEFAULT) -> Iterator[Row]:
    """The branches that the session was settled by, else those that `select` chooses, oldest first.

    `read` gives what its turns hold by handle alone. Raises TraceError where a branch cannot be flattened.
    """
    for sample in record.samples(select):
        yield _row(sample, record, read)


def _row(sample: Sample, record: SessionRecord, read: Read) -> Row:
    tree, last = record.tree, sample.turns[-1].turn
    return Row(
        session=sample.session,
        branch=sample.branch,
        role=sample.role,
        rollout_id=_name(sample.rollout_id),
        group_id=_name(sample.group_id),
        task_id=_name(sample.task_id),
        reward=None if sample.reward is None else float(sample.reward),
        status=record.status,
        ids=sample.ids,
        loss_mask=sample.loss_mask.astype(np.uint8),
        rollout_logprobs=sample.rollout_logprobs,
        versions=sample.versions,
        experts=experts_row(sample, read),
        turns=[_turn(span, tree.turn(span.turn)) for span in sample.turns],
        messages=_messages(tree, last),
        tools=[_tool(tool) for tool in tree.turn(last).tools],
        metadata=_json(record.opening.metadata),
    )


def _name(value: object) -> str | None:
    """A name as text: metadata may hold a number in its place."""
    return None if value is None else str(value)


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
        reward=span.reward,
    )


def _messages(tree: TraceTree, last: str) -> list[MessageRow]:
    """What was said up to `last`'s reply. Only replies get a mark: an id that a client sent back is none."""
    sampled: dict[int, str] = {}
    output: Output | None = tree.node(last)
    while output is not None:
        sampled[output.num_messages - 1] = output.turn.id
        output = output.before
    rows = [cast("MessageRow", message_row(message)) for message in tree.said(last)]
    for place, turn in sampled.items():
        rows[place]["turn"] = turn
    return rows


def _tool(tool: Tool) -> ToolRow:
    return ToolRow(name=tool.name, description=tool.description, parameters=_json(tool.parameters))


def _json(value: object) -> str:
    return orjson.dumps(value).decode()
