"""Routed experts, of a sample as a column and of a column as the passes of its turns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stenograph.errors import PayloadFreed
from stenograph.interchange.columns import ExpertsRow, Row, TurnRow
from stenograph.traces.experts import routed_experts
from stenograph.traces.payloads import Read
from stenograph.types import Sample

Passes = NDArray[np.integer]  # [passes, layers, experts per token]


def experts_row(sample: Sample, read: Read) -> ExpertsRow | None:
    """The passes that something in the row was sampled from; that over its last id is none of them.

    None for a dense model, and where they were freed with their session. Raises TraceError where they are damaged.
    """
    try:
        routed = routed_experts(sample, read)
    except PayloadFreed:
        return None
    if routed is None:
        return None
    experts, known = routed
    known[-1:] = False
    written = np.where(known[:, None, None], experts, 0).astype(experts.dtype.newbyteorder("<"))
    return ExpertsRow(
        dtype=experts.dtype.name, shape=list(written.shape), data=written.tobytes(), mask=known.astype(np.uint8)
    )


def known_passes(row: Row, span: TurnRow) -> Passes | None:
    """The known passes of a branch up to the one that sampled the last token of `span`, without a gap."""
    held = row["experts"]
    if held is None or span["end"] <= span["start"]:
        return None
    dtype: np.dtype[Any] = np.dtype(held["dtype"]).newbyteorder("<")
    experts = np.frombuffer(held["data"], dtype).reshape(held["shape"])
    stop = span["end"] - 1
    unknown = np.flatnonzero(held["mask"][:stop] == 0)
    return experts[unknown[-1] + 1 if len(unknown) else 0 : stop]


def agreed(one: Passes, other: Passes) -> Passes:
    """The last passes of both that are equal, in the smaller of their types."""
    if one is other or one.shape[1:] != other.shape[1:]:
        return one
    num = min(len(one), len(other))
    one, other = one[len(one) - num :], other[len(other) - num :]
    different = np.flatnonzero((one != other).any(axis=(1, 2)))
    held = min(one, other, key=lambda passes: passes.dtype.itemsize)
    return held[different[-1] + 1 if len(different) else 0 :]
