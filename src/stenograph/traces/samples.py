"""Branches flattened for training: every array has one entry per id, written in one pass over the same turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from stenograph.errors import TraceError
from stenograph.traces.experts import routings
from stenograph.traces.selection import Branch, Selection
from stenograph.traces.trace import TraceTree
from stenograph.types import Sample, Sampling, Turn, TurnSpan

UNSELECTED = "unselected"  # trained in another branch, or of a role that is not trained


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


def flatten(
    session: str,
    tree: TraceTree,
    selection: Selection,
    reward: float | None,
    turn_rewards: Mapping[str, float],
    metadata: Mapping[str, Any],
) -> list[Sample]:
    """One sample per branch of `selection`, oldest first. `turn_rewards` are by turn.

    Raises TraceError as `experts.routings` does.
    """
    return [_sample(session, tree, branch, reward, turn_rewards, metadata) for branch in selection.branches]


def _sample(
    session: str,
    tree: TraceTree,
    branch: Branch,
    reward: float | None,
    turn_rewards: Mapping[str, float],
    metadata: Mapping[str, Any],
) -> Sample:
    """Flatten the whole of the branch's last turn, then cut everything at one place."""
    turns = [(tree.turn(name), tree.node(name).start) for name in branch.turns]
    ids = tree.path_ids(branch.turns[-1])
    rollout_logprobs = np.zeros(len(ids), np.float32)
    versions = np.full(len(ids), -1, np.int32)
    for turn, start in turns:
        end = start + len(turn.output_ids)
        rollout_logprobs[start:end] = turn.rollout_logprobs
        for offset, version in turn.versions:  # each up to where the next one writes over it
            versions[start + offset : end] = version
    loss_mask = versions >= 0
    spans = [_span(turn, start, branch, turn_rewards.get(turn.id)) for turn, start in turns]
    for span in spans:
        if span.mask_reason is not None:
            loss_mask[span.start : span.end] = False
    try:
        experts = routings(turns)
    except TraceError as e:
        raise TraceError(f"session {session}, branch {branch.number}: {e}") from None
    if branch.truncated:
        spans[-1] = replace(spans[-1], end=branch.length, ended_by="length")
    kept = slice(branch.length)
    return Sample(
        session=session,
        branch=branch.number,
        role=turns[-1][0].role,
        rollout_id=metadata.get("rollout_id"),
        group_id=metadata.get("group_id"),
        task_id=metadata.get("task_id"),
        reward=reward,
        ids=ids[kept],
        loss_mask=loss_mask[kept],
        rollout_logprobs=rollout_logprobs[kept],
        versions=versions[kept],
        turns=tuple(spans),
        experts=experts,
    )


def _span(turn: Turn, start: int, branch: Branch, reward: float | None) -> TurnSpan:
    return TurnSpan(
        turn=turn.id,
        start=start,
        end=start + len(turn.output_ids),
        ended_by=turn.ended_by,
        temperature=turn.sampling.temperature,
        top_p=turn.sampling.top_p,
        logprobs_mode=turn.logprobs_mode,
        reward=reward,
        mask_reason=mask_reason(turn.sampling) or (None if turn.id in branch.trains else UNSELECTED),
    )
