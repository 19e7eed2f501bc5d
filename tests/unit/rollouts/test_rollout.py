"""An attempt's end, whatever it is, stays its own; its session is always closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from stenograph.agents import SessionHandle, load_agent
from stenograph.agents.remote import CallableAgent, Solve
from stenograph.config import AgentConfig
from stenograph.errors import ConfigError, JudgeError, RolloutError
from stenograph.judges import Judge
from stenograph.rollouts import Attempts, GatewayClient, evaluate
from stenograph.types import Judgement, Outcome, Task
from support.agents.gateway import ADMIN_KEY, FakeGateway, fake_gateway

TASK = Task("t", "6 * 7 = ?", "42")


async def answers(task: Task, session: SessionHandle) -> str:
    return "42"


async def waits(task: Task, session: SessionHandle) -> str:
    await asyncio.sleep(60)
    return ""


async def matches(task: Task, outcome: Outcome) -> Judgement:
    return Judgement(float(outcome.answer == task.answer), {"form": 1.0})


@asynccontextmanager
async def attempts(
    solve: Solve = answers, judge: Judge = matches, max_concurrent: int = 8, timeout_s: float = 10.0
) -> AsyncIterator[tuple[Attempts, FakeGateway]]:
    async with fake_gateway() as gateway, GatewayClient(gateway.url, ADMIN_KEY, model="m") as client:
        yield Attempts(client, CallableAgent(solve, timeout_s), judge, max_concurrent), gateway


async def test_a_completed_attempt_is_judged_and_sealed() -> None:
    sessions: list[SessionHandle] = []

    async def solve(task: Task, session: SessionHandle) -> str:
        sessions.append(session)
        return "42"

    async with attempts(solve) as (runner, gateway):
        rollout = await runner.run(TASK, "g")
    assert (rollout.reward, rollout.status, rollout.error) == (1.0, "completed", None)
    assert (rollout.group_id, rollout.task, rollout.parts) == ("g", TASK, {"form": 1.0})
    assert rollout.seconds > 0
    assert sessions == [SessionHandle(rollout.session, f"{gateway.url}/s/{rollout.session}", "key-steno_0", "m")]
    metadata = {"rollout_id": rollout.id, "group_id": "g", "task_id": "t"}
    assert gateway.opened == {rollout.session: {"traced": True, "metadata": metadata}}
    assert gateway.sealed == {rollout.session: {"reward": 1.0, "status": "completed"}}
    assert not gateway.deleted


async def test_an_agent_that_fails_earns_nothing() -> None:
    async def solve(task: Task, session: SessionHandle) -> str:
        raise ValueError("x" * 10_000 + "the end of it")

    async with attempts(solve) as (runner, gateway):
        rollout = await runner.run(TASK, "g")
    assert (rollout.reward, rollout.status) == (0.0, "agent_failed")
    assert rollout.error is not None
    assert rollout.error.endswith("the end of it")
    assert len(rollout.error) < 1000
    assert gateway.sealed[rollout.session] == {"reward": 0.0, "status": "agent_failed"}


async def test_an_agent_that_runs_out_of_time_earns_nothing() -> None:
    async with attempts(waits, timeout_s=0.05) as (runner, gateway):
        rollout = await runner.run(TASK, "g")
    assert (rollout.reward, rollout.status) == (0.0, "timeout")
    assert gateway.sealed[rollout.session] == {"reward": 0.0, "status": "timeout"}


async def test_a_process_and_its_judge_share_a_folder() -> None:
    async def reads(task: Task, outcome: Outcome) -> Judgement:
        with open(f"{outcome.workdir}/made") as file:  # noqa: ASYNC230
            return Judgement(float(file.read()))

    code = "import os; open('made', 'w').write('0.5'); print(os.environ['OPENAI_BASE_URL'])"
    async with attempts(judge=reads) as (runner, _):
        runner.agent = load_agent(AgentConfig(command=("python", "-c", code)))
        rollout = await runner.run(TASK, "g")
    assert (rollout.reward, rollout.status) == (0.5, "completed")


async def fails_to_judge(task: Task, outcome: Outcome) -> Judgement:
    raise JudgeError("no verdict")


async def test_a_judge_that_fails_leaves_no_reward() -> None:
    async with attempts(judge=fails_to_judge) as (runner, gateway):
        rollout = await runner.run(TASK, "g")
    assert (rollout.reward, rollout.status, rollout.error) == (None, "error", "no verdict")
    assert gateway.sealed[rollout.session] == {"reward": None, "status": "error"}


async def test_an_agent_that_cannot_start_leaves_no_reward() -> None:
    async with attempts() as (runner, gateway):
        runner.agent = load_agent(AgentConfig(url="http://127.0.0.1:1/"))
        rollout = await runner.run(TASK, "g")
    assert (rollout.reward, rollout.status) == (None, "error")
    assert gateway.sealed[rollout.session] == {"reward": None, "status": "error"}


async def test_a_judge_knows_how_many_turns_there_are() -> None:
    async def judge(task: Task, outcome: Outcome) -> Judgement:
        return Judgement(0.5, {}, tuple(float(n) for n in range(outcome.num_turns)))

    async with attempts(judge=judge) as (runner, gateway):
        gateway.num_turns = 3
        rollout = await runner.run(TASK, "g")
        assert rollout.turn_rewards == (0.0, 1.0, 2.0)
        assert gateway.sealed[rollout.session]["turn_rewards"] == [0.0, 1.0, 2.0]
        result = await evaluate(runner, [TASK], 1)  # of what is not recorded too
    assert (result.reward_mean, result.num_errors) == (0.5, 0)


@pytest.mark.parametrize("action", ["open", "get", "seal"])
async def test_a_gateway_that_fails_leaves_no_reward(action: str) -> None:
    """What could not be sealed may still change: nobody may learn from it."""
    async with attempts() as (runner, gateway):
        gateway.failing.add(action)
        rollout = await runner.run(TASK, "g")
    assert (rollout.reward, rollout.status) == (None, "error")
    assert rollout.error is not None
    assert f"no {action} today" in rollout.error
    assert rollout.session == ("" if action == "open" else "steno_0")


async def test_a_gateway_that_is_gone_and_a_wrong_key_are_errors_of_the_attempt() -> None:
    async with attempts() as (runner, gateway):
        for client in (GatewayClient("http://127.0.0.1:1", ADMIN_KEY), GatewayClient(gateway.url, "wrong")):
            async with client as runner.gateway:
                assert (await runner.run(TASK, "g")).status == "error"
    with pytest.raises(RolloutError, match="async with"):
        await GatewayClient(gateway.url, ADMIN_KEY).release(["steno_0"])


async def test_sessions_are_released_each_once_and_nothing_is_sent_for_none() -> None:
    async with attempts() as (runner, gateway):
        names = [(await runner.run(TASK, "g")).session for _ in range(3)]
        assert sorted(await runner.gateway.release([*names, *names])) == sorted(names)
        assert sorted(gateway.deleted) == sorted(names)
        assert await GatewayClient(gateway.url, ADMIN_KEY).release([]) == []  # it is not even open
        assert await runner.gateway.release(name for name in ()) == []
        assert len(gateway.deleted) == 3


async def test_one_session_that_cannot_be_released_leaves_the_others_released_and_is_told() -> None:
    async with attempts() as (runner, gateway):
        names = [(await runner.run(TASK, "g")).session for _ in range(3)]
        gateway.failing.add(f"delete {names[0]}")
        with pytest.raises(RolloutError, match=f"answered 500 to DELETE /sessions/{names[0]}"):
            await runner.gateway.release(names)
        assert sorted(gateway.deleted) == sorted(names[1:])


async def test_one_failure_leaves_its_siblings_alone() -> None:
    async def solve(task: Task, session: SessionHandle) -> str:
        if task.id == "1":
            raise RuntimeError("mine alone")
        return "42"

    async with attempts(solve) as (runner, gateway):
        tasks = [Task(str(n), "p", "42") for n in range(4)]
        rollouts = await runner.run_all([(task, f"g{task.id}") for task in tasks])
    assert [rollout.status for rollout in rollouts] == ["completed", "agent_failed", "completed", "completed"]
    assert [rollout.task for rollout in rollouts] == tasks
    assert len({rollout.id for rollout in rollouts}) == 4
    assert len(gateway.sealed) == 4


async def test_no_more_run_at_once_than_allowed() -> None:
    seen: list[int] = []

    async def solve(task: Task, session: SessionHandle) -> str:
        await asyncio.sleep(0.01)
        return "42"

    async with attempts(solve, max_concurrent=3) as (runner, _):
        runner.changed = seen.append
        await runner.run_all([(TASK, "g")] * 10)
    assert max(seen) == 3
    assert seen[-1] == 0
    assert len(seen) == 20


async def test_cancelled_attempts_leave_no_session() -> None:
    async with attempts(waits) as (runner, gateway):
        running = asyncio.create_task(runner.run_all([(TASK, "g")] * 3))
        await gateway.has_opened(3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert sorted(gateway.deleted) == sorted(gateway.opened)
        assert not gateway.sealed


@pytest.mark.parametrize("fault", [ConfigError("the user's"), ZeroDivisionError("a bug")])
async def test_what_is_no_failure_of_an_attempt_ends_them_all(fault: Exception) -> None:
    async def judge(task: Task, outcome: Outcome) -> Judgement:
        raise fault

    async def solve(task: Task, session: SessionHandle) -> str:
        return await (answers if task.id == "t" else waits)(task, session)

    async with attempts(solve, judge) as (runner, gateway):
        with pytest.raises(type(fault), match=str(fault)):
            await runner.run_all([(TASK, "g"), (Task("u", "p"), "h")])
        assert sorted(gateway.deleted) == sorted(gateway.opened)


async def test_evaluation_is_untraced_and_leaves_no_session() -> None:
    async def solve(task: Task, session: SessionHandle) -> str:
        return "42" if task.id != "b" else "no"

    async with attempts(solve) as (runner, gateway):
        result = await evaluate(runner, [Task(id, "p", "42") for id in "abc"], 2)
    assert (result.reward_mean, result.num_rollouts, result.num_errors) == (pytest.approx(2 / 3), 6, 0)
    assert result.reward_stderr == pytest.approx(1 / 3)  # of 1, 0, 1: sqrt(1/3 / 3)
    assert [opened["traced"] for opened in gateway.opened.values()] == [False] * 6
    assert sorted(gateway.deleted) == sorted(gateway.opened)
    assert not gateway.sealed


async def test_evaluation_leaves_out_what_our_own_parts_failed() -> None:
    async def judge(task: Task, outcome: Outcome) -> Judgement:
        if task.id == "b":
            raise JudgeError("no verdict")
        return Judgement(1.0)

    async with attempts(judge=judge) as (runner, _):
        result = await evaluate(runner, [Task(id, "p", "42") for id in "ab"], 3)
    assert (result.reward_mean, result.num_rollouts, result.num_errors) == (1.0, 3, 3)
