"""Attempts against the gateway as a user starts it, with agents that are processes: every session ends as it should."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stenograph.agents import SessionHandle, load_agent
from stenograph.agents.remote import CallableAgent
from stenograph.config import AgentConfig, JudgeConfig, RolloutsConfig, TasksConfig
from stenograph.errors import JudgeError
from stenograph.judges import Judge, load_judge
from stenograph.rollouts import Attempts, GatewayClient, batches, evaluate
from stenograph.types import Judgement, Outcome, Rollout, Task
from support.agents.processes import gone, written
from support.serving import Server, serving, write_script

SCRIPT: list[dict[str, Any]] = [
    {"when": "right", "content": "42"},
    {"when": "wrong", "content": "43"},
    {"when": "hang", "fault": "hang"},
    {"when": "error", "fault": "error"},
]
AGENT = """
import json, os, sys, time, urllib.request

def ask(text):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]["content"]

def note(moment):
    if moment in task["data"]:
        with open(task["data"][moment], "a") as file:
            file.write(f"{os.getpid()}\\n")

task = json.load(open(os.environ["STENO_TASK"]))
note("begun")
print(ask(sys.argv[1]))
note("asked")
if "then exit" in sys.argv[1]:
    sys.exit(7)
if "then sleep" in sys.argv[1]:
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    script = write_script(tmp_path_factory.mktemp("script") / "script.jsonl", *SCRIPT)
    with serving("--engine", script, "--set", "gateway.seal_timeout_s=0.2") as server:
        yield server


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> AgentConfig:
    file = tmp_path_factory.mktemp("agent") / "agent.py"
    file.write_text(AGENT)
    return AgentConfig(command=("python", "-S", str(file), "{prompt}"), timeout_s=20)


@asynccontextmanager
async def attempts(server: Server, agent: AgentConfig, judge: Judge | None = None) -> AsyncIterator[Attempts]:
    async with GatewayClient(server.url, server.admin_key) as gateway:
        yield Attempts(gateway, load_agent(agent), judge or load_judge(JudgeConfig()), 8)


async def get(server: Server, path: str) -> Any:
    return await asyncio.to_thread(server.call, "GET", path)


async def is_there(server: Server, session: str) -> bool:
    try:
        await get(server, f"/sessions/{session}")
    except urllib.error.HTTPError as e:
        with e:
            return e.code != 404
    return True


async def recorded(server: Server, rollout: Rollout) -> dict[str, Any]:
    """The session's state, how many turns it holds, and what its samples say of the rollout."""
    info = await get(server, f"/sessions/{rollout.session}")
    samples = await get(server, f"/sessions/{rollout.session}/samples")
    ledger = await get(server, f"/sessions/{rollout.session}/ledger")
    assert ledger["in_flight"] + sum(ledger["masked"].values()) + sum(ledger["dropped"].values()) == ledger["sampled"]
    for sample in samples:
        assert (sample["rollout_id"], sample["group_id"], sample["task_id"]) == (rollout.id, "g", rollout.task.id)
    return {"state": info["state"], "num_turns": info["num_turns"], "rewards": [s["reward"] for s in samples]}


async def test_every_end_seals_its_session_and_hurts_no_sibling(server: Server, agent: AgentConfig) -> None:
    ends = {
        "right": (1.0, "completed", 1),
        "wrong": (0.0, "completed", 1),
        "right, then exit": (0.0, "agent_failed", 1),
        "right, then sleep": (0.0, "timeout", 1),
        "hang": (0.0, "timeout", 0),
        "error": (0.0, "agent_failed", 0),
        "right, no verdict": (None, "error", 1),
    }

    async def judge(task: Task, outcome: Outcome) -> Judgement:
        if "no verdict" in task.prompt:
            raise JudgeError("no verdict")
        return Judgement(float(outcome.answer == task.answer))

    async with attempts(server, agent.model_copy(update={"timeout_s": 4.0}), judge) as runner:
        rollouts = await runner.run_all([(Task(f"t{n}", prompt, "42"), "g") for n, prompt in enumerate(ends)])
    for rollout, (prompt, (reward, status, num_turns)) in zip(rollouts, ends.items(), strict=True):
        assert (rollout.reward, rollout.status) == (reward, status), prompt
        held = await recorded(server, rollout)
        assert (held["state"], held["num_turns"]) == ("sealed", num_turns), prompt
        assert held["rewards"] == [reward] * num_turns, prompt
        assert (rollout.error is None) == (status == "completed")


async def test_a_callable_agent_and_one_that_cannot_start(server: Server, agent: AgentConfig) -> None:
    async def solve(task: Task, session: SessionHandle) -> str:
        body = {"model": session.model, "messages": [{"role": "user", "content": task.prompt}]}
        headers = {"x-api-key": session.api_key}
        async with aiohttp.ClientSession() as client:
            async with client.post(f"{session.base_url}/v1/chat/completions", json=body, headers=headers) as response:
                return json.loads(await response.text())["choices"][0]["message"]["content"]

    async with attempts(server, agent) as runner:
        runner.agent = CallableAgent(solve, 10)
        good = await runner.run(Task("t", "right", "42"), "g")
        runner.agent = load_agent(AgentConfig(url="http://127.0.0.1:1/"))
        bad = await runner.run(Task("t", "right", "42"), "g")
    assert (good.reward, await recorded(server, good)) == (1.0, {"state": "sealed", "num_turns": 1, "rewards": [1.0]})
    assert (bad.status, await recorded(server, bad)) == ("error", {"state": "sealed", "num_turns": 0, "rewards": []})


async def test_evaluation_leaves_no_session_behind(server: Server, agent: AgentConfig) -> None:
    opened: list[str] = []

    async with attempts(server, agent) as runner:
        original = runner.agent

        class Noting:
            def run(self, task: Task, session: SessionHandle) -> Any:
                opened.append(session.id)
                return original.run(task, session)

        runner.agent = Noting()
        tasks = [Task("a", "right", "42"), Task("b", "wrong", "42"), Task("c", "error", "42")]
        result = await evaluate(runner, tasks, 1)
    assert (result.reward_mean, result.num_rollouts, result.num_errors) == (pytest.approx(1 / 3), 3, 0)
    assert len(opened) == 3
    assert not any([await is_there(server, session) for session in opened])


async def test_cancelling_ends_agents_generations_and_sessions(
    server: Server, agent: AgentConfig, tmp_path: Path
) -> None:
    """Closing the iterator while a batch is under way: agents wait for an engine that says nothing."""
    tasks = [Task("t", "hang", "42", data={"begun": str(tmp_path / "pids")})]
    async with attempts(server, agent) as runner:
        sessions: list[str] = []
        opened = runner.gateway.open

        async def noting(**options: Any) -> SessionHandle:
            handle = await opened(**options)
            sessions.append(handle.id)
            return handle

        runner.gateway.open = noting
        made = batches(runner, tasks, TasksConfig(), RolloutsConfig(num_groups=1, group_size=2), range(3))
        asking = asyncio.ensure_future(anext(made))
        async with asyncio.timeout(10):
            while (await written(tmp_path / "pids")).count("\n") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await made.aclose()
    assert len(sessions) == 2
    assert not any([await is_there(server, session) for session in sessions])
    for pid in (tmp_path / "pids").read_text().split():
        assert await gone(int(pid))


async def test_a_gateway_that_dies_under_an_agent(agent: AgentConfig, tmp_path: Path) -> None:
    script = write_script(tmp_path / "script.jsonl", *SCRIPT)
    with serving("--engine", script) as server:
        async with attempts(server, agent) as runner:
            task = Task("t", "right, then sleep", "42", data={"asked": str(tmp_path / "pids")})
            running = asyncio.create_task(runner.run(task, "g"))
            pid = int(await written(tmp_path / "pids"))
            server.process.terminate()
            await asyncio.to_thread(server.process.wait, 20)
            os.kill(pid, signal.SIGTERM)
            rollout = await running
    assert (rollout.reward, rollout.status) == (None, "error")
    assert rollout.error is not None
    assert rollout.error.startswith("the agent exited with -15: ; could not POST /sessions/")
