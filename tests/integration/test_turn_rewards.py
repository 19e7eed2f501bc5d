"""What a judge says of single turns stands on them in every sample; of turns that are not there it is an error."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import aiohttp
import pytest

from stenograph.agents import SessionHandle
from stenograph.agents.remote import CallableAgent
from stenograph.config import JudgeConfig
from stenograph.judges import load_judge
from stenograph.rollouts import Attempts, GatewayClient
from stenograph.traces.memory import MemoryTraceStore
from stenograph.traces.sqlite import SqliteTraceStore
from stenograph.traces.store import TraceStore
from stenograph.types import Task
from support.listening import CHAT, Client, listening, rendering, say

LINES = [say(rendering(), text) for text in ("one", "two", "three")]
REWARDS = (0.1, -2.5, 1 / 3)
CALLABLE = """
from stenograph.types import Judgement

def judge(task, outcome):
    rewards = (0.1, -2.5, 1 / 3, 4.0)[: outcome.num_turns + task.data["too_many"]]
    return Judgement(1.0, {"form": 0.5}, rewards)
"""
COMMAND = """
import json, sys

given = json.load(sys.stdin)
rewards = (0.1, -2.5, 1 / 3, 4.0)[: given["outcome"]["num_turns"] + given["task"]["data"]["too_many"]]
print(json.dumps({"reward": 1.0, "parts": {"form": 0.5}, "turn_rewards": rewards}))
"""


async def solve(task: Task, session: SessionHandle) -> str:
    """Two turns of a conversation, and a third that goes on from the first as well."""
    headers = {"authorization": f"Bearer {session.api_key}"}

    async def ask(*texts: str) -> str:
        roles = ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
        async with http.post(session.base_url + CHAT, json={"model": "m", "messages": messages}) as answer:
            return json.loads(await answer.read())["choices"][0]["message"]["content"]

    async with aiohttp.ClientSession(headers=headers) as http:
        one = await ask("hello")
        await ask("hello", one, "and then?")
        return await ask("hello", one, "or rather?")


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TraceStore:
    return MemoryTraceStore() if request.param == "memory" else SqliteTraceStore(tmp_path / "traces.db")


@pytest.fixture(params=["callable", "command"])
def judge(request: pytest.FixtureRequest, tmp_path: Path) -> JudgeConfig:
    file = tmp_path / "scores.py"
    file.write_text(CALLABLE if request.param == "callable" else COMMAND)
    if request.param == "callable":
        return JudgeConfig(kind="callable", callable=f"{file}:judge")
    return JudgeConfig(kind="command", command=(sys.executable, str(file)))


@asynccontextmanager
async def attempts(store: TraceStore, judge: JudgeConfig) -> AsyncIterator[tuple[Attempts, Client]]:
    with closing(store):
        async with listening(LINES, store) as client, GatewayClient(client.url, "admin") as gateway:
            yield Attempts(gateway, CallableAgent(solve, 60), load_judge(judge), 1), client


async def test_what_a_judge_says_of_turns_reaches_the_samples(store: TraceStore, judge: JudgeConfig) -> None:
    async with attempts(store, judge) as (runner, client):
        rollout = await runner.run(Task("t", "p", data={"too_many": 0}), "g")
        assert (rollout.status, rollout.reward, rollout.turn_rewards) == ("completed", 1.0, REWARDS)
        given = dict(zip(store.tree(rollout.session).turns, REWARDS, strict=True))
        samples = store.samples(rollout.session)
        assert [len(sample.turns) for sample in samples] == [2, 2]
        assert [{span.turn: span.reward for span in sample.turns} for sample in samples] == [
            {turn: given[turn] for turn in store.tree(rollout.session).path_turns(sample.turns[-1].turn)}
            for sample in samples
        ]
        shown = await client.json("GET", f"/sessions/{rollout.session}/samples")
        assert {turn["turn"]: turn["reward"] for row in shown for turn in row["turns"]} == given


async def test_a_reward_of_a_turn_that_is_not_there_is_the_judges_error(store: TraceStore, judge: JudgeConfig) -> None:
    async with attempts(store, judge) as (runner, _):
        rollout = await runner.run(Task("t", "p", data={"too_many": 1}), "g")
        assert (rollout.status, rollout.reward, rollout.parts, rollout.turn_rewards) == ("error", None, {}, ())
        assert rollout.error is not None
        assert "4 turn rewards were given, and the session has 3 turns; give at most one a turn" in rollout.error
        info = store.get(rollout.session)
        assert (info.state, info.status, info.reward, info.num_turns) == ("sealed", "error", None, 3)
        assert {span.reward for sample in store.samples(rollout.session) for span in sample.turns} == {None}


async def test_turn_rewards_that_cannot_be_recorded_are_refused_by_the_gateway(store: TraceStore) -> None:
    with closing(store):
        async with listening(LINES, store) as client:
            session = await client.open()
            await session.ask(json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode())
            for given, told in (
                (b'{"turn_rewards": [1, 2]}', "2 turn rewards were given, and the session has 1 turns"),
                (b'{"turn_rewards": 1}', "turn_rewards: must be a list of numbers, got 1"),
                (b'{"turn_rewards": [1, true]}', "turn_rewards: must be a list of numbers, got [1, True]"),
                (b'{"turn_rewards": [null]}', "turn_rewards: must be a list of numbers, got [None]"),
                (b'{"turn_rewards": [1e999]}', "the body is not JSON"),
            ):
                status, _, body = await client.send("POST", f"/sessions/{session.id}/seal", given)
                error = json.loads(body)["error"]
                assert (status, set(error)) == (400, {"type", "message"})
                assert error["message"].startswith(told)
            assert store.get(session.id).state == "open"
            for given in (
                {"reward": 1, "turn_rewards": [2]},
                {},
                {"turn_rewards": None},
            ):  # again, and it keeps what was said
                assert (await client.json("POST", f"/sessions/{session.id}/seal", given))["state"] == "sealed"
                assert [span.reward for sample in store.samples(session.id) for span in sample.turns] == [2.0]
