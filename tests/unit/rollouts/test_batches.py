"""No batch begins more than max_staleness policy versions before it is trained on, and none stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from stenograph.agents import SessionHandle
from stenograph.agents.remote import CallableAgent
from stenograph.config import RolloutsConfig, TasksConfig
from stenograph.rollouts import Attempts, Batch, GatewayClient, batches
from stenograph.tasks import tasks_for_step
from stenograph.types import Judgement, Outcome, Task
from support.agents.gateway import ADMIN_KEY, FakeGateway, fake_gateway

TASKS = [Task(str(n), "p", "42") for n in range(5)]
ORDER = TasksConfig(seed=3)


async def one(task: Task, outcome: Outcome) -> Judgement:
    return Judgement(1.0)


@asynccontextmanager
async def attempts(pause_s: float = 0.0) -> AsyncIterator[tuple[Attempts, FakeGateway]]:
    async def solve(task: Task, session: SessionHandle) -> str:
        await asyncio.sleep(pause_s)
        return "42"

    async with fake_gateway() as gateway, GatewayClient(gateway.url, ADMIN_KEY) as client:
        yield Attempts(client, CallableAgent(solve, 60), one, 64), gateway


def rollouts_config(max_staleness: int) -> RolloutsConfig:
    return RolloutsConfig(num_groups=2, group_size=3, max_staleness=max_staleness)


async def test_a_batch_holds_its_steps_groups() -> None:
    async with attempts() as (runner, _):
        made = [batch async for batch in batches(runner, TASKS, ORDER, rollouts_config(0), range(4, 6))]
    assert [batch.step for batch in made] == [4, 5]
    for batch in made:
        chosen = tasks_for_step(TASKS, batch.step, 2, seed=3, shuffle=True)
        expected = [(task, f"step-{batch.step + 1:06d}-group-{n}") for n, task in enumerate(chosen) for _ in range(3)]
        assert [(rollout.task, rollout.group_id) for rollout in batch.rollouts] == expected


@pytest.mark.parametrize("max_staleness", [0, 1, 3, 10])
async def test_batches_run_ahead_by_no_more_than_allowed(max_staleness: int) -> None:
    version, begun = 0, dict[int, int]()

    def note(step: int) -> None:
        begun[step] = version

    async with attempts() as (runner, _):
        made = batches(runner, TASKS, ORDER, rollouts_config(max_staleness), range(6), note)
        async for batch in made:
            await asyncio.sleep(0.02)  # training: whatever may begin meanwhile does
            assert batch.step == version
            version += 1
    assert begun == {step: max(step - max_staleness, 0) for step in range(6)}


async def test_closing_ends_what_was_under_way() -> None:
    async with attempts(0.2) as (runner, gateway):
        made = batches(runner, TASKS, ORDER, rollouts_config(2), range(9))
        taken = {rollout.session for rollout in (await anext(made)).rollouts}
        begun = len(gateway.opened)
        await made.aclose()
        assert begun == 3 * 6
        assert sorted(gateway.deleted) == sorted(gateway.opened.keys() - taken)
        await asyncio.sleep(0.05)
        assert len(gateway.opened) == begun


async def test_cancelling_the_consumer_ends_what_was_under_way() -> None:
    async with attempts(60) as (runner, gateway):
        made = batches(runner, TASKS, ORDER, rollouts_config(1), range(9))

        async def consume() -> list[Batch]:
            return [batch async for batch in made]

        consumer = asyncio.create_task(consume())
        await gateway.has_opened(12)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        assert sorted(gateway.deleted) == sorted(gateway.opened)


async def test_a_bug_reaches_the_consumer_and_ends_the_rest() -> None:
    async with attempts() as (runner, gateway):

        async def broken(task: Task, outcome: Outcome) -> Judgement:
            raise ZeroDivisionError("a bug")

        runner.judge = broken
        with pytest.raises(ZeroDivisionError, match="a bug"):
            async for _ in batches(runner, TASKS, ORDER, rollouts_config(1), range(9)):
                pass
        assert len(gateway.deleted) == len(gateway.opened)
