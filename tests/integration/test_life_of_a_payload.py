"""Whatever becomes of a call, a rollout or a gateway: what nobody holds is gone, and nothing else is."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest

from stenograph.agents import SessionHandle
from stenograph.agents.remote import CallableAgent, Solve
from stenograph.config import RolloutsConfig, TasksConfig
from stenograph.engines.scripted import Line
from stenograph.errors import JudgeError
from stenograph.rollouts import Attempts, GatewayClient, batches
from stenograph.traces.experts import routed_experts
from stenograph.traces.memory import MemoryTraceStore
from stenograph.traces.payloads import Holder
from stenograph.traces.session import Opening
from stenograph.types import Judgement, Outcome, Payload, Task, Turn
from support.listening import Client, Session, becomes, chat_body, listening, rendering, say
from support.payloads import RoutedEngine, Watched, byte_of

RENDERING = rendering()
ASK = chat_body("hello")
FIRST, SECOND = say(RENDERING, "the first"), say(RENDERING, "the second one")
SLOW = say(RENDERING, "a slow answer of some length", fault="pace:0.02")
ANY = Line(FIRST.ids, when="")
EXPORT = Holder("sample", "export")


class Store(MemoryTraceStore):
    """What it keeps is watched; `failing` is what the next commits end in, one by one."""

    def __init__(self, *failing: BaseException) -> None:
        super().__init__()
        self.payloads = self.watched = Watched()
        self.opened: list[str] = []
        self.failing = list(failing)

    def open(self, opening: Opening) -> None:
        super().open(opening)
        self.opened.append(opening.id)

    def commit(self, session: str, parent: str | None, *turns: Turn) -> None:
        if self.failing:
            raise self.failing.pop(0)
        super().commit(session, parent, *turns)


@asynccontextmanager
async def gateway(store: Store, *script: Line, **settings: Any) -> AsyncIterator[tuple[Client, Session]]:
    async with listening(RoutedEngine(list(script)), store, **settings) as client:
        yield client, await client.open()


async def released(client: Client, session: str) -> list[str]:
    return (await client.json("DELETE", f"/sessions/{session}"))["released"]


def held_by(store: Store, session: str) -> list[Payload]:
    """What a session's turns hold, all of it there."""
    turns = store.tree(session).turns.values()
    held = [turn.experts for turn in turns if turn.experts is not None]
    assert len(held) == len(turns)
    for turn, payload in zip(turns, held, strict=True):
        assert np.array_equal(store.payloads.get(payload), byte_of(turn.output_ids))
    return held


# --- a call --------------------------------------------------------------------------------------------------------


async def test_siblings_hold_a_payload_each_until_their_session_is_released() -> None:
    store = Store()
    async with gateway(store, FIRST, SECOND) as (client, session):
        assert (await session.ask(chat_body("hello", n=2)))[0] == 200
        assert held_by(store, session.id) == store.watched.made
        rows = await client.json("GET", f"/sessions/{session.id}/samples")
        for row, line in zip(rows, (FIRST, SECOND), strict=True):
            experts = row["experts"]
            assert (experts["dtype"], experts["shape"]) == ("uint8", [len(row["ids"])])
            read = np.frombuffer(base64.b64decode(experts["base64"]), np.uint8)
            assert read[np.array(experts["mask"]) == 1].tobytes() == byte_of(line.ids).tobytes()
        assert store.watched.left() == store.watched.made
        assert await released(client, session.id) == [session.id]
        assert (len(store.watched.made), store.watched.left()) == (2, [])
        assert await released(client, session.id) == []


@pytest.mark.parametrize("failure", [OSError("disk full"), asyncio.CancelledError()], ids=lambda e: type(e).__name__)
async def test_a_commit_that_fails_frees_what_was_sampled_for_it_and_a_retry_keeps_its_own(
    failure: BaseException,
) -> None:
    store = Store(failure)
    async with gateway(store, FIRST, SECOND, FIRST, SECOND) as (client, session):
        ask = chat_body("hello", n=2)
        assert (await session.ask(ask))[0] in (409, 500)
        assert (len(store.watched.made), store.watched.left()) == (2, [])
        assert (await session.ask(ask))[0] == 200
        assert held_by(store, session.id) == store.watched.left() == store.watched.made[2:]
        await released(client, session.id)
        assert store.watched.left() == []


async def test_a_turn_that_nobody_heard_is_held_once_by_its_session_and_a_retry_adds_nothing() -> None:
    store = Store()
    async with gateway(store, SLOW) as (client, session):
        _, writer = await session.connect(ASK)
        await becomes(lambda: len(client.gateway.sessions.find(session.id).tasks) > 0)
        writer.close()
        await session.until("undelivered")
        assert held_by(store, session.id) == store.watched.made
        assert (await session.ask(ASK))[0] == 200
        await session.until("delivered")
        assert held_by(store, session.id) == store.watched.made
        await released(client, session.id)
        assert (len(store.watched.made), store.watched.left()) == (1, [])


async def test_a_call_that_is_cancelled_leaves_nothing() -> None:
    store = Store()
    async with gateway(store, FIRST, SLOW, on_disconnect="abort") as (client, session):
        _, writer = await session.connect(chat_body("hello", n=2))  # one choice is done, the other is not
        held = client.gateway.sessions.find(session.id)
        await becomes(lambda: any(call.shown for calls in held.calls.values() for call in calls))
        writer.close()
        await becomes(lambda: not held.tasks)
        assert (await session.turns(), store.watched.left()) == ([], [])


async def test_an_untraced_turn_keeps_nothing() -> None:
    store = Store()
    async with gateway(store, FIRST) as (client, _):
        untraced = await client.open(traced=False)
        assert (await untraced.ask(ASK))[0] == 200
        assert store.watched.made == []


# --- a session -----------------------------------------------------------------------------------------------------


async def test_a_new_rollout_of_an_exported_session_frees_nothing_of_its_tree() -> None:
    store = Store()
    async with gateway(store, FIRST, SECOND) as (client, session):
        await session.ask(ASK)
        (sample,) = store.samples(session.id, holder=EXPORT)
        await session.ask(ASK)
        assert store.payloads.release([EXPORT]) == []
        assert len(held_by(store, session.id)) == 2
        assert routed_experts(sample, store.payloads.get) is not None
        rows = await client.json("GET", f"/sessions/{session.id}/samples")
        assert [row["experts"]["shape"] for row in rows] == [[len(row["ids"])] for row in rows]
        store.samples(session.id, holder=EXPORT)
        await released(client, session.id)
        assert store.watched.left() == store.watched.made
        assert len(store.payloads.release([EXPORT])) == 2


async def test_a_session_that_expires_holds_what_it_recorded_until_it_is_released() -> None:
    store = Store()
    async with gateway(store, FIRST) as (client, _):
        session = await client.open(ttl_s=1e-9)
        await session.ask(ASK)
        await client.gateway.sessions.expire(1.0)
        assert (await session.ask(ASK))[0] == 409
        assert held_by(store, session.id) == store.watched.made
        await released(client, session.id)
        assert store.watched.left() == []


async def test_at_shutdown_requests_let_go_and_sessions_hold_what_is_theirs() -> None:
    store = Store()
    async with gateway(store, FIRST, SLOW) as (client, session):
        await session.ask(ASK)
        waiting = asyncio.create_task(session.ask(chat_body("and then?", n=1)))
        await becomes(lambda: len(client.gateway.sessions.find(session.id).tasks) > 0)
        await client.gateway.stop()
        await asyncio.gather(waiting, return_exceptions=True)
    assert held_by(store, session.id) == store.watched.left() == store.watched.made
    assert store.release([session.id]) == [session.id]
    assert (len(store.watched.made), store.watched.left()) == (1, [])


# --- rollouts ------------------------------------------------------------------------------------------------------


async def asks(session: SessionHandle) -> str:
    headers = {"authorization": f"Bearer {session.api_key}"}
    url = f"{session.base_url}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, data=ASK, headers=headers) as answer:
        return json.loads(await answer.read())["choices"][0]["message"]["content"]


async def judge(task: Task, outcome: Outcome) -> Judgement:
    if task.id == "unjudged":
        raise JudgeError("no verdict")
    return Judgement(1.0)


@asynccontextmanager
async def attempts(store: Store, solve: Solve) -> AsyncIterator[Attempts]:
    async with listening(RoutedEngine([ANY]), store) as client:
        async with GatewayClient(client.gateway.url, "admin") as to:
            yield Attempts(to, CallableAgent(solve, 60), judge, 64)


async def answers(task: Task, session: SessionHandle) -> str:
    return await asks(session)


async def answers_and_waits(task: Task, session: SessionHandle) -> str:
    answer = await asks(session)
    await asyncio.sleep(60 if task.id == "waits" else 0)
    return answer


async def test_rollouts_that_are_cancelled_before_they_have_a_result_leave_nothing() -> None:
    store = Store()
    async with attempts(store, answers_and_waits) as runner:
        tasks = [Task("waits", "p"), Task("waits", "p"), Task("ends", "p")]
        running = asyncio.create_task(runner.run_all([(task, "g") for task in tasks]))
        sealed = runner.gateway.seal
        ended = asyncio.Event()

        async def seal(session: str, **said: Any) -> None:
            await sealed(session, **said)
            ended.set()

        runner.gateway.seal = seal
        await becomes(lambda: len(store.watched.made) == 3)
        await ended.wait()
        assert len(store.watched.left()) == 3
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert store.watched.left() == []


async def test_a_rollout_without_a_verdict_is_held_until_its_step_ends() -> None:
    store = Store()
    async with attempts(store, answers) as runner:
        (rollout,) = await runner.run_all([(Task("unjudged", "p"), "g")])
        assert rollout.status == "error"
        assert held_by(store, rollout.session) == store.watched.left()
        assert await runner.gateway.release([rollout.session, rollout.session, "unknown"]) == [rollout.session]
        assert store.watched.left() == []


async def test_releasing_a_batch_leaves_the_one_that_waits_and_closing_releases_that() -> None:
    store = Store()
    async with attempts(store, answers) as runner:
        config = RolloutsConfig(num_groups=1, group_size=2, max_staleness=1)
        made = batches(runner, [Task("t", "p")], TasksConfig(), config, range(3))
        first = await anext(made)
        done = [rollout.session for rollout in first.rollouts]
        await becomes(lambda: len(store.opened) == 4)
        waiting = [name for name in store.opened if name not in done]
        await becomes(lambda: all(store.get(name).state == "sealed" for name in waiting))
        store.samples(waiting[0], holder=EXPORT)
        assert sorted(await runner.gateway.release(done)) == sorted(done)
        left = [payload for name in waiting for payload in held_by(store, name)]
        assert len(left) == 2
        assert store.watched.left() == left
        await made.aclose()
        assert [payload.id for payload in store.watched.left()] == store.payloads.release([EXPORT]) == [left[0].id]
