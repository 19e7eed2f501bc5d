"""Agents that are coroutines or servers come to the same outcomes as processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from stenograph.agents import SessionHandle, load_agent
from stenograph.agents.remote import CallableAgent, Solve
from stenograph.config import AgentConfig
from stenograph.errors import AgentError, ConfigError
from stenograph.types import Outcome, Task
from support.agents.gateway import listening
from support.agents.processes import there

SESSION = SessionHandle("steno_1", "http://gateway/s/steno_1", "the-key", "the-model")
TASK = Task("t", "1 + 1 = ?")


async def run(solve: Solve, timeout_s: float = 5.0) -> Outcome:
    async with CallableAgent(solve, timeout_s).run(TASK, SESSION) as outcome:
        assert there(outcome.workdir)
    assert not there(outcome.workdir)
    return outcome


async def test_a_callable_answers() -> None:
    async def solve(task: Task, session: SessionHandle) -> str:
        return f"{task.prompt} {session.api_key}"

    outcome = await run(solve)
    assert (outcome.answer, outcome.exit_code) == ("1 + 1 = ? the-key", 0)


async def test_what_a_callable_raises_is_its_outcome() -> None:
    async def solve(task: Task, session: SessionHandle) -> str:
        raise TimeoutError("my own")  # not ours: the deadline has not passed

    outcome = await run(solve)
    assert (outcome.answer, outcome.exit_code) == (None, 1)
    assert "TimeoutError: my own" in outcome.stderr


async def test_a_callable_that_takes_too_long_is_stopped() -> None:
    ended = asyncio.Event()

    async def solve(task: Task, session: SessionHandle) -> str:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return "late"

    outcome = await run(solve, timeout_s=0.1)
    assert (outcome.answer, outcome.exit_code) == (None, None)
    assert ended.is_set()


async def test_an_answer_that_is_no_text_is_the_agents_failure() -> None:
    async def solve(task: Task, session: SessionHandle) -> Any:
        return 42

    outcome = await run(solve)
    assert (outcome.answer, outcome.exit_code) == (None, 1)
    assert "an agent answers a text or None, got 42" in outcome.stderr


async def test_cancelling_passes_through() -> None:
    begun = asyncio.Event()

    async def solve(task: Task, session: SessionHandle) -> str:
        begun.set()
        await asyncio.sleep(60)
        return ""

    running = asyncio.create_task(run(solve))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_a_callable_that_is_not_async_stops_at_start_up(tmp_path: Path) -> None:
    module = tmp_path / "mine.py"
    module.write_text("def solve(task, session): return ''\n")
    with pytest.raises(ConfigError, match="is not async"):
        load_agent(AgentConfig(callable=f"{module}:solve"))


async def post(*routes: web.RouteDef) -> Outcome:
    async with listening(*routes) as url:
        async with load_agent(AgentConfig(url=f"{url}/solve", timeout_s=5)).run(TASK, SESSION) as outcome:
            return outcome


async def test_a_server_gets_task_and_session_and_answers() -> None:
    got: list[Any] = []

    async def solve(request: web.Request) -> web.Response:
        got.append(await request.json())
        return web.json_response({"answer": "2"})

    outcome = await post(web.post("/solve", solve))
    assert (outcome.answer, outcome.exit_code) == ("2", 0)
    (body,) = got
    assert (body["base_url"], body["api_key"], body["task"]["prompt"]) == (
        SESSION.base_url,
        SESSION.api_key,
        TASK.prompt,
    )


async def test_a_servers_error_and_a_strange_answer_are_its_failure() -> None:
    async def fail(request: web.Request) -> web.Response:
        return web.Response(status=503, text="overworked")

    async def strange(request: web.Request) -> web.Response:
        return web.json_response(["2"])

    failed = await post(web.post("/solve", fail))
    assert failed.exit_code == 1
    assert "answered 503: overworked" in failed.stderr
    assert (await post(web.post("/solve", strange))).exit_code == 1


async def test_a_server_that_is_not_there_is_ours_to_mend() -> None:
    async with listening() as url:
        pass
    with pytest.raises(AgentError, match=r"agent\.url: no answer"):
        async with load_agent(AgentConfig(url=url)).run(TASK, SESSION):
            pass
