"""Branches flattened for training: every array has one entry per id, and a sampled token trains in one sample only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stenograph.traces.trace import TraceTree
from stenograph.types import Sample, Sampling, Turn, TurnSpan


def mask_reason(sampling: Sampling) -> str | None:
    """Why tokens sampled this way are not trained, or None.

    Off the full support the sampling distribution is not the softmax that the trainer computes, so the ratio of the
    two would be wrong.
    """
    if sampling.temperature == 0:
        return "greedy"
    if sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
        return "truncated_support"
    if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1:
        return "penalised"
    if sampling.constrained:
        return "constrained"
    return None


def flatten(session: str, tree: TraceTree, reward: float | None, metadata: Mapping[str, Any]) -> list[Sample]:
    """One sample per branch, oldest first. A token shared by branches is trainable in the oldest."""
    claimed: set[str] = set()
    return [
        _branch(session, number, leaf, tree, reward, metadata, claimed) for number, leaf in enumerate(tree.leaves())
    ]


def _branch(
    session: str,
    number: int,
    leaf: str,
    tree: TraceTree,
    reward: float | None,
    metadata: Mapping[str, Any],
    claimed: set[str],
) -> Sample:
    ids = tree.path_ids(leaf)
    loss_mask = np.zeros(len(ids), np.bool_)
    rollout_logprobs = np.zeros(len(ids), np.float32)
    versions = np.full(len(ids), -1, np.int32)
    spans = []
    for name in tree.path_turns(leaf):
        turn, node = tree.turn(name), tree.node(name)
        here = slice(node.start, node.end)
        rollout_logprobs[here] = turn.rollout_logprobs
        for start, version in turn.versions:  # each up to where the next one writes over it
            versions[node.start + start : node.end] = version
        loss_mask[here] = name not in claimed and mask_reason(turn.sampling) is None
        spans.append(_span(turn, node.start))
        claimed.add(name)
    return Sample(
        session=session,
        branch=number,
        role=tree.turn(leaf).role,
        rollout_id=metadata.get("rollout_id"),
        group_id=metadata.get("group_id"),
        task_id=metadata.get("task_id"),
        reward=reward,
        ids=ids,
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
        versions=versions,
        turns=tuple(spans),
    )


def _span(turn: Turn, start: int) -> TurnSpan:
    end = start + len(turn.output_ids)
    sampling = turn.sampling
    return TurnSpan(turn.id, start, end, turn.ended_by, sampling.temperature, sampling.top_p, turn.logprobs_mode)
