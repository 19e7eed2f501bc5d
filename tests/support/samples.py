"""Samples made by hand and at random, for the tiny model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stenograph.types import Sample, TurnSpan

VOCAB = 307  # of support.models.tiny_model


def make_sample(
    segments: Sequence[tuple[str, Sequence[int]]],
    *,
    rollout: str = "r",
    group: str | None = "g",
    reward: float | None = 1.0,
    branch: int = 0,
    temperature: float = 1.0,
    version: int = 0,
) -> Sample:
    """A sample from ("context" | "output", ids) pieces; the outputs are trainable."""
    ids = np.array([i for _, piece in segments for i in piece], np.int32)
    mask = np.array([kind == "output" for kind, piece in segments for _ in piece], bool)
    turns, start = [], 0
    for kind, piece in segments:
        if kind == "output":
            turns.append(
                TurnSpan(f"t{start}", start, start + len(piece), "eos", temperature, 1.0, "processed"),
            )
        start += len(piece)
    logprobs = np.where(mask, -0.01 * (ids + 1), 0).astype(np.float32)
    return Sample(
        session=f"steno_{rollout}",
        branch=branch,
        role="main",
        rollout_id=rollout,
        group_id=group,
        task_id="task",
        reward=reward,
        ids=ids,
        loss_mask=mask,
        rollout_logprobs=logprobs,
        versions=np.where(mask, version, -1).astype(np.int32),
        turns=tuple(turns),
    )


def random_groups(
    seed: int = 0, *, num_groups: int = 2, group_size: int = 3, prompt: int = 12, outputs: tuple[int, int] = (5, 4)
) -> list[Sample]:
    """Groups with a prompt in common; each sample is prompt, output, context, output."""
    rng = np.random.default_rng(seed)

    def ids(n: int) -> list[int]:
        return rng.integers(0, VOCAB, n).tolist()

    samples = []
    for g in range(num_groups):
        shared = ids(prompt)
        for r in range(group_size):
            pieces = [
                ("context", shared),
                ("output", ids(outputs[0])),
                ("context", ids(3)),
                ("output", ids(outputs[1])),
            ]
            samples.append(make_sample(pieces, rollout=f"{g}-{r}", group=f"g{g}", reward=float(rng.random())))
    return samples
