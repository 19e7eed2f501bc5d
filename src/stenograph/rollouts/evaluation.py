"""Held-out success: the same agent and judge on tasks that are never trained on, without a record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stenograph.rollouts.rollout import Attempts
from stenograph.types import Task


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Over tasks x samples attempts; attempts that our own parts failed are left out and counted."""

    reward_mean: float
    reward_stderr: float  # of the mean, over tasks
    num_rollouts: int
    num_errors: int


async def evaluate(attempts: Attempts, tasks: Sequence[Task], num_samples: int) -> Evaluation:
    """`num_samples` untraced attempts at each task."""
    pairs = [(task, f"eval-{task.id}") for task in tasks for _ in range(num_samples)]
    rollouts = await attempts.run_all(pairs, traced=False)
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    by_task: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            by_task.setdefault(rollout.group_id, []).append(rollout.reward)
    means = [sum(group) / len(group) for group in by_task.values()]
    mean = sum(rewards) / len(rewards) if rewards else math.nan
    spread = sum((m - mean) ** 2 for m in means) / max(len(means) - 1, 1)
    return Evaluation(mean, math.sqrt(spread / max(len(means), 1)), len(rewards), len(rollouts) - len(rewards))
