"""Batches of rollouts, in order, each begun at most `max_staleness` policy versions before it is trained on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from stenograph.config import RolloutsConfig, TasksConfig
from stenograph.rollouts.rollout import Attempts
from stenograph.tasks import tasks_for_step
from stenograph.types import Rollout, Task


@dataclass(frozen=True, slots=True)
class Batch:
    """The rollouts of one training step."""

    step: int
    rollouts: tuple[Rollout, ...]


async def batches(
    attempts: Attempts,
    tasks: Sequence[Task],
    order: TasksConfig,
    config: RolloutsConfig,
    steps: range,
    begun: Callable[[int], None] = lambda step: None,
) -> AsyncGenerator[Batch, None]:
    """Yield a batch per step; asking for the next says that the last was trained on.

    With max_staleness = 0 a batch begins when the one before it has been trained on; with n, up to n batches more are
    under way meanwhile. Closing the iterator cancels them, and releases those that nobody has asked for.
    """

    async def make(step: int) -> Batch:
        begun(step)
        chosen = tasks_for_step(tasks, step, config.num_groups, seed=order.seed, shuffle=order.shuffle)
        pairs = [
            (task, f"step-{step + 1:06d}-group-{n}") for n, task in enumerate(chosen) for _ in range(config.group_size)
        ]
        return Batch(step, tuple(await attempts.run_all(pairs)))

    ahead: list[asyncio.Task[Batch]] = []
    waiting = iter(steps)
    try:
        for _ in steps:
            while len(ahead) <= config.max_staleness and (step := next(waiting, None)) is not None:
                ahead.append(asyncio.create_task(make(step)))
            batch = await ahead[0]
            del ahead[0]  # whoever asked has it now, and releases it
            yield batch
    finally:
        for task in ahead:
            task.cancel()
        for left in await asyncio.gather(*ahead, return_exceptions=True):
            if isinstance(left, Batch):
                await attempts.discard(left.rollouts)
