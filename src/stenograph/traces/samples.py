"""Branches flattened for training: every array has one entry per id, written in one pass over the same turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stenograph.errors import TraceError
from stenograph.traces.selection import Branch, Selection
from stenograph.traces.trace import TraceTree
from stenograph.types import Mask, Sample, Sampling, Turn, TurnSpan


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
    session: str, tree: TraceTree, selection: Selection, reward: float | None, metadata: Mapping[str, Any]
) -> list[Sample]:
    """One sample per branch of `selection`, oldest first.

    Raises TraceError, naming the turns, where some turns of a branch have routed experts and others have none.
    """
    return [_sample(session, tree, branch, reward, metadata) for branch in selection.branches]


def _sample(session: str, tree: TraceTree, branch: Branch, reward: float | None, metadata: Mapping[str, Any]) -> Sample:
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
    for turn, start in turns:
        if turn.id not in branch.trains or mask_reason(turn.sampling) is not None:
            loss_mask[start : start + len(turn.output_ids)] = False
    try:
        experts, experts_mask = _experts(turns, len(ids))
    except TraceError as e:
        raise TraceError(f"session {session}, branch {branch.number}: {e}") from None
    spans = [_span(turn, start) for turn, start in turns]
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
        experts=None if experts is None else experts[kept],
        experts_mask=None if experts_mask is None else experts_mask[kept],
    )


def _span(turn: Turn, start: int) -> TurnSpan:
    end = start + len(turn.output_ids)
    sampling = turn.sampling
    return TurnSpan(turn.id, start, end, turn.ended_by, sampling.temperature, sampling.top_p, turn.logprobs_mode)


def _experts(turns: Sequence[tuple[Turn, int]], length: int) -> tuple[NDArray[np.integer] | None, Mask | None]:
    """Routing by input token, and where it is known; None for a dense model. `turns` with where their outputs start."""
    sampled = [(turn, start) for turn, start in turns if len(turn.output_ids)]  # the others made no pass
    routed = [(turn, start, turn.experts) for turn, start in sampled if turn.experts is not None]
    if not routed:
        return None, None
    first, _, like = routed[0]
    _check_experts(sampled, first, like)
    experts = np.zeros((length, *like.shape[1:]), np.result_type(*{rows.dtype for _, _, rows in routed}))
    known = np.zeros(length, np.bool_)
    for turn, start, rows in reversed(routed):  # the pass that sampled counts, not one that read its tokens again
        end = start + len(turn.output_ids) - 1  # no pass of this turn had its last token as input
        experts[end - len(rows) : end] = rows
        known[end - len(rows) : end] = True
    return experts, known


def _check_experts(turns: Sequence[tuple[Turn, int]], first: Turn, like: NDArray[np.integer]) -> None:
    """Raise TraceError unless every turn has rows of experts as `first` has, and as many as it may have."""
    for turn, start in turns:
        rows, num_tokens = turn.experts, len(turn.output_ids)
        if rows is None:
            told = f"turn {first.id} has routed experts, turn {turn.id} has none; set engine.experts = true, "
            raise TraceError(told + "so that a turn without them is refused when it is taken")
        if rows.shape[1:] != like.shape[1:]:
            told = f"turn {first.id} has experts {like.shape[1:]} a token, turn {turn.id} {rows.shape[1:]}; "
            raise TraceError(told + "serve one model in one session")
        if not num_tokens <= len(rows) < start + num_tokens:
            told = f"turn {turn.id} has {len(rows)} rows of experts for {num_tokens} tokens after {start} others; "
            raise TraceError(told + "have the engine return one for each pass, the one that sampled last at the end")
