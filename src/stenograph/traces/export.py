"""Samples, trees and conversations as plain rows: what `/samples`, `/tree` and `steno inspect` show."""

from __future__ import annotations

import base64
from dataclasses import asdict
from typing import Any

import numpy as np

from stenograph.traces.experts import routed_experts
from stenograph.traces.payloads import Read
from stenograph.traces.trace import Node, Output, TraceTree
from stenograph.types import Message, Sample


def sample_row(sample: Sample, read: Read | None = None) -> dict[str, Any]:
    """A sample; arrays stay NumPy, the mask as 0 and 1. Raises TraceError where its experts were freed.

    Without `read` there are none in it: those of a run that is read back went with their sessions.
    """
    fields = ("branch", "role", "rollout_id", "group_id", "task_id", "reward", "ids", "rollout_logprobs", "versions")
    row = {name: getattr(sample, name) for name in fields}
    row["loss_mask"] = sample.loss_mask.astype(np.uint8)
    row["experts"] = None if read is None else _experts_row(sample, read)
    row["turns"] = [asdict(span) for span in sample.turns]
    return row


def _experts_row(sample: Sample, read: Read) -> dict[str, Any] | None:
    """Routed experts as base64 of the array in C order, little-endian; `mask` is 1 where they are known."""
    if (routed := routed_experts(sample, read)) is None:
        return None
    experts, known = routed
    little = experts.astype(experts.dtype.newbyteorder("<"), order="C", copy=False)
    return {
        "dtype": experts.dtype.name,
        "shape": experts.shape,
        "base64": base64.b64encode(little.data).decode(),
        "mask": known.astype(np.uint8),
    }


def session_row(sample: Sample, tree: TraceTree) -> dict[str, Any]:
    """A sample with its session's id, what was said on its branch, and the tools that stood there."""
    last = sample.turns[-1].turn
    tools = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in tree.turn(last).tools]
    return {
        "session": sample.session,
        **sample_row(sample),
        "messages": [message_row(message) for message in tree.said(last)],
        "tools": tools,
    }


def message_row(message: Message) -> dict[str, Any]:
    """A message in the form of chat completions, empty fields left out."""
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        row["reasoning_content"] = message.reasoning
    if message.tool_calls:
        row["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        row["tool_call_id"] = message.tool_call_id
    if message.name:
        row["name"] = message.name
    return row


def tree_row(tree: TraceTree, with_ids: bool) -> dict[str, Any]:
    """Nodes and turns, parents before children."""
    numbers: dict[Node | None, int] = {node: number for number, node in enumerate(tree.nodes())}
    nodes = []
    for number, node in enumerate(tree.nodes()):
        is_output = isinstance(node, Output)
        row = {"id": number, "parent": numbers.get(node.parent), "kind": "output" if is_output else "context"}
        row |= {"start": node.start, "length": len(node.ids)}
        row |= {"turn": node.turn.id} if is_output else {}
        nodes.append(row | ({"ids": node.ids} if with_ids else {}))
    turns = [
        {
            "id": turn.id,
            "node": numbers[tree.node(turn.id)],
            "parent": tree.parent(turn.id),
            "extends": turn.extends,
            "state": tree.state(turn.id),
            "finish_reason": turn.finish_reason,
            "role": turn.role,
            "role_evidence": turn.role_evidence,
            "versions": turn.versions,
            "accepted": turn.accepted,
            "notes": turn.notes,
        }
        for turn in tree.turns.values()
    ]
    return {"nodes": nodes, "turns": turns}
