"""Packed sequences: a token shared by several of them is computed once, and sees exactly what it saw in each.

A pack is the prefix tree of its sequences, laid out depth first. So the tokens that a token must see, its ancestors,
are those before it whose subtree has not ended yet: `(j <= i) & (i < ends[j])` is the whole attention mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stenograph.training.batch import SIGNALS, TokenArrays

Indices = NDArray[np.int64]
TargetMask = Literal["loss_mask", "action_mask"]


@dataclass(frozen=True, slots=True)
class Pack:
    """One micro-batch: a forest of token positions, and the targets that some of them predict.

    A position may predict several targets, since sequences part after it; `rows` are the distinct ones (distinct also
    in temperature), and `row_of_target` names each target's row. Targets are grouped by sequence.
    """

    ids: Indices  # [tokens]
    positions: Indices  # [tokens] distance from the sequence's start
    ends: Indices  # [tokens] index behind the token's subtree
    rows: Indices  # [rows] index of a predicting token
    row_temperature: NDArray[np.float32]  # [rows]
    row_of_target: Indices  # [targets]
    signals: dict[str, NDArray[Any]]  # name in SIGNALS -> [targets]; "ids" are the targets' own
    sequences: tuple[int, ...]  # where each one stood in the packed list
    cu_seqlens: NDArray[np.int32]  # [sequences + 1] bounds of each sequence's targets
    ends_of_sequences: Indices  # [sequences] index of each one's last token
    targets: TargetMask  # which of a sequence's tokens are targets

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def without_loss(self) -> Pack:
        """The same pack for the same passes, none of whose tokens is trained."""
        nothing = np.zeros_like(self.signals["loss_mask"])
        return replace(self, signals=self.signals | {"loss_mask": nothing})

    def scatter(self, values: NDArray[Any], into: Sequence[TokenArrays], name: str) -> None:
        """Write a value per target back to the tokens that they belong to: `into[sequence][name]`."""
        for n, sequence in enumerate(self.sequences):
            arrays = into[sequence]
            arrays[name][arrays[self.targets]] = values[self.cu_seqlens[n] : self.cu_seqlens[n + 1]]


def pack(sequences: Sequence[TokenArrays], max_tokens: int, targets: TargetMask = "loss_mask") -> list[Pack]:
    """Packs of at most `max_tokens` tokens, shared ones counted once; a longer sequence gets a pack of its own.

    Deterministic: sequences are taken in the order of their ids, so that those which share a prefix are neighbours.
    Sequences without a target are left out.
    """
    asked = [n for n, arrays in enumerate(sequences) if arrays[targets].any()]
    # Big-endian bytes of ids, which are not negative, sort as the ids do; equal ids stay in the order given.
    order = sorted(asked, key=lambda n: sequences[n]["ids"].astype(">u4").tobytes())
    packs: list[Pack] = []
    chosen: list[int] = []
    num_tokens = 0
    for n in order:
        ids = sequences[n]["ids"]
        added = len(ids) - (common_prefix(sequences[chosen[-1]]["ids"], ids) if chosen else 0)
        if chosen and num_tokens + added > max_tokens:
            packs.append(_forest(sequences, chosen, targets))
            chosen, num_tokens, added = [], 0, len(ids)
        chosen.append(n)
        num_tokens += added
    if chosen:
        packs.append(_forest(sequences, chosen, targets))
    return packs


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many leading ids are equal."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _forest(sequences: Sequence[TokenArrays], chosen: list[int], targets: TargetMask) -> Pack:
    """Lay out sequences that are sorted by their ids: each one adds what it does not share with the one before."""
    lengths = [len(sequences[n]["ids"]) for n in chosen]
    ids = np.empty(sum(lengths), np.int64)
    positions, ends = np.empty_like(ids), np.empty_like(ids)
    predictors: list[Indices] = []
    last: list[int] = []
    path, previous = np.empty(0, np.int64), np.empty(0, np.int32)  # layout index and id of the last one's tokens
    size = 0
    for n, length in zip(chosen, lengths, strict=True):
        arrays = sequences[n]
        shared = common_prefix(previous, arrays["ids"])
        start, size = size, size + length - shared
        ids[start:size] = arrays["ids"][shared:]
        positions[start:size] = np.arange(shared, length)
        path, previous = np.concatenate([path[:shared], np.arange(start, size)]), arrays["ids"]
        ends[path] = size  # whoever comes last has the say: a token's sequences are neighbours
        predictors.append(path[np.flatnonzero(arrays[targets]) - 1])
        last.append(path[-1])

    signals = {name: np.concatenate([sequences[n][name][sequences[n][targets]] for n in chosen]) for name in SIGNALS}
    # One row for each distinct (token, temperature); the token leads, so rows keep the layout's order.
    pairs = np.stack([np.concatenate(predictors).astype(np.float64), signals["temperature"].astype(np.float64)])
    rows, row_of_target = np.unique(pairs, axis=1, return_inverse=True)
    return Pack(
        ids=ids[:size],
        positions=positions[:size],
        ends=ends[:size],
        rows=rows[0].astype(np.int64),
        row_temperature=rows[1].astype(np.float32),
        row_of_target=row_of_target.reshape(-1).astype(np.int64),
        signals=signals,
        sequences=tuple(chosen),
        cu_seqlens=np.cumsum([0, *(len(p) for p in predictors)], dtype=np.int32),
        ends_of_sequences=np.array(last, np.int64),
        targets=targets,
    )
