"""Routed experts of a branch: handles alone say where they lie and whether they fit; values come when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stenograph.errors import TraceError
from stenograph.traces.payloads import Read
from stenograph.types import Mask, Payload, Routing, Sample, Turn


def routings(turns: Sequence[tuple[Turn, int]]) -> tuple[Routing, ...]:
    """Where the experts of a branch lie; `turns` with where their outputs start, oldest first.

    Raises TraceError, naming the turns, where some have routed experts and others have none, or they do not fit.
    """
    sampled = [(turn, start) for turn, start in turns if len(turn.output_ids)]  # the others made no pass
    routed = [(turn, start, turn.experts) for turn, start in sampled if turn.experts is not None]
    if routed:
        first, _, like = routed[0]
        _check(sampled, first, like)
    # No pass of a turn had its last token as input.
    return tuple(Routing(payload, start + len(turn.output_ids) - 1) for turn, start, payload in routed)


def routed_experts(sample: Sample, read: Read) -> tuple[NDArray[Any], Mask] | None:
    """Experts [tokens, layers, experts per token] and where they are known [tokens], 0 elsewhere; None without any.

    experts[i] is the routing of the forward pass whose input is ids[i]. Raises TraceError where one was freed.
    """
    if not sample.experts:
        return None
    length = len(sample.ids)
    dtype = np.result_type(*{np.dtype(routing.payload.dtype) for routing in sample.experts})
    experts = np.zeros((length, *sample.experts[0].payload.shape[1:]), dtype)
    known = np.zeros(length, np.bool_)
    for routing in reversed(sample.experts):  # the pass that sampled counts, not one that read its tokens again
        rows = read(routing.payload)
        start, end = routing.end - len(rows), min(routing.end, length)  # a sample may be cut within its last turn
        experts[start:end] = rows[: end - start]
        known[start:end] = True
    return experts, known


def _check(turns: Sequence[tuple[Turn, int]], first: Turn, like: Payload) -> None:
    """Raise TraceError unless every turn has rows of experts as `first` has, and as many as it may have."""
    for turn, start in turns:
        if turn.experts is None:
            told = f"turn {first.id} has routed experts, turn {turn.id} has none; set engine.experts = true, "
            raise TraceError(told + "so that a turn without them is refused when it is taken")
        (num_rows, *shape), num_tokens = turn.experts.shape, len(turn.output_ids)
        if tuple(shape) != like.shape[1:]:
            told = f"turn {first.id} has experts {like.shape[1:]} a token, turn {turn.id} {tuple(shape)}; "
            raise TraceError(told + "serve one model in one session")
        if not num_tokens <= num_rows < start + num_tokens:
            told = f"turn {turn.id} has {num_rows} rows of experts for {num_tokens} tokens after {start} others; "
            raise TraceError(told + "have the engine return one for each pass, the one that sampled last at the end")
