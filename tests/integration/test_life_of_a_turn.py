"""Whatever fails or leaves, at any step: nothing is seen whole that is not recorded, and no token goes missing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from stenograph.engines.base import Chunk, Generate
from stenograph.engines.scripted import Line, ScriptedEngine
from stenograph.traces.memory import MemoryTraceStore
from stenograph.types import Reply, Turn
from support.listening import Session, becomes, chat_body, listening, rendering, say

RENDERING = rendering()
ASK = chat_body("hello")
ASK_STREAM = chat_body("hello", stream=True)
SLOW = say(RENDERING, "a slow answer of some length", fault="pace:0.02")
FIRST, SECOND = say(RENDERING, "the first"), say(RENDERING, "the second")


def content(answer: tuple[int, Any, bytes]) -> str:
    status, _, body = answer
    assert status == 200, body
    return json.loads(body)["choices"][0]["message"]["content"]


def streamed(raw: bytes) -> str:
    """What a streamed answer's deltas say."""
    events = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(event) for event in events]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk.get("choices"))


async def leave(session: Session, body: bytes, after: bytes = b"", half: bool = False) -> None:
    """Send a request, read up to `after`, and go away: with both halves of the connection, or with one."""
    reader, writer = await session.connect(body)
    async with asyncio.timeout(20):
        if after:
            await reader.readuntil(after)
        else:
            await becomes(lambda: len(session.client.gateway.sessions.find(session.id).tasks) > 0)
        if half:
            writer.write_eof()
            await reader.read()
        writer.close()
        await writer.wait_closed()


class Counting(ScriptedEngine):
    """Says what it was asked and whether it was closed before its end."""

    def __init__(self, *script: Line) -> None:
        super().__init__(list(script))
        self.asked: list[Generate] = []
        self.closed = 0

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        self.asked.append(request)
        ended = False
        try:
            async for chunk in super().generate(request):
                ended = chunk.finish_reason is not None
                yield chunk
        finally:
            self.closed += not ended


# --- the engine ----------------------------------------------------------------------------------------------------


HALF = say(RENDERING, "half of this is said")


@pytest.mark.parametrize(
    ("fault", "status", "sampled"),
    [
        ("error", 502, 0),
        ("refuse", 503, 0),
        ("overflow", 400, 0),
        ("garbage", 502, 0),
        ("cut", 502, len(HALF.ids) // 2),
        ("counts", 502, len(HALF.ids)),  # the last one without a log-probability
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_fault_is_an_error_and_no_turn(fault: str, status: int, sampled: int, stream: bool) -> None:
    async with listening([replace(HALF, fault=fault)]) as client:
        session = await client.open()
        raw = await session.raw(ASK_STREAM if stream else ASK.replace(b"{", b'{"stream": false, ', 1))
        if stream and sampled:
            assert b"200 OK" in raw.split(b"\r\n")[0]
            assert streamed(raw)
            assert b'data: {"error"' in raw
            assert b"[DONE]" not in raw
            assert b'"finish_reason":"' not in raw
            assert not raw.endswith(b"0\r\n\r\n")
        else:
            assert str(status).encode() in raw.split(b"\r\n")[0]
        assert await session.turns() == []
        ledger = await session.ledger()
        assert ledger["dropped"] == ({"engine_failed": sampled} if sampled else {})


async def test_an_engine_that_says_nothing_is_given_up() -> None:
    async with listening([say(RENDERING, "never said", fault="hang")], idle_timeout_s=0.1) as client:
        session = await client.open()
        status, _, body = await session.ask(ASK)
        assert (status, b"idle_timeout_s" in body) == (502, True)
        assert (await session.ledger())["sampled"] == 0


async def test_a_paused_engine_holds_the_connection_and_then_says_when_to_come_back() -> None:
    engine = ScriptedEngine([FIRST, SECOND])
    async with listening(engine, idle_timeout_s=0.3, keep_alive_s=0.05) as client:
        session = await client.open()
        await engine.pause("finish")
        status, headers, _ = await session.ask(ASK)
        assert (status, int(headers["retry-after"]) > 0) == (429, True)
        reader, writer = await session.connect(ASK_STREAM)
        await asyncio.wait_for(reader.readuntil(b": keep-alive"), 20)
        await engine.resume()
        assert b'"finish_reason":"stop"' in await asyncio.wait_for(reader.readuntil(b"data: [DONE]"), 20)
        writer.close()
        await session.until("delivered")


async def test_a_stream_begins_with_its_first_comment() -> None:
    hangs = say(RENDERING, "never said", fault="hang")
    async with listening([hangs], idle_timeout_s=0.6, keep_alive_s=0.4) as client:
        session = await client.open()
        raw = await session.raw(ASK_STREAM)
        assert (raw.count(b": keep-alive"), b"idle_timeout_s" in raw) == (1, True)


async def test_an_aborting_pause_is_an_error_that_a_retry_mends() -> None:
    engine = ScriptedEngine([SLOW, FIRST])
    async with listening(engine) as client:
        session = await client.open()
        reader, writer = await session.connect(ASK_STREAM)
        await asyncio.wait_for(reader.readuntil(b'"content":"a'), 20)
        await engine.pause("abort")
        assert b"[DONE]" not in await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert set((await session.ledger())["dropped"]) == {"aborted"}
        await engine.resume()
        assert content(await session.ask(ASK)) == "the first"


# --- the store -----------------------------------------------------------------------------------------------------


class Full(MemoryTraceStore):
    """A store that has no room for turns."""

    def commit(self, session: str, parent: str | None, *turns: Turn) -> None:
        raise OSError("no space left on device")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_cannot_be_recorded_is_not_answered(stream: bool) -> None:
    async with listening([FIRST], Full()) as client:
        session = await client.open()
        raw = await session.raw(chat_body("hello", stream=stream))
        assert b"no space left" in raw
        if stream:
            assert (streamed(raw), b"[DONE]" in raw, raw.endswith(b"0\r\n\r\n")) == ("the first", False, False)
        else:
            assert b"500" in raw.split(b"\r\n")[0]
            assert b"the first" not in raw
        ledger = await session.ledger()
        assert ledger["dropped"] == {"commit_failed": len(FIRST.ids)}


# --- the client ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_whose_client_went_away_is_given_to_a_repeat(stream: bool, half: bool) -> None:
    engine = Counting(SLOW, SECOND)
    async with listening(engine) as client:
        session = await client.open()
        if stream:
            await leave(session, ASK_STREAM, after=b'"content":"a', half=half)
        else:
            await leave(session, ASK, half=half)
        await session.until("undelivered")
        assert content(await session.ask(ASK)) == "a slow answer of some length"
        await session.until("delivered")
        assert len(engine.asked) == 1
        assert content(await session.ask(ASK)) == "the second"  # after delivery a repeat is a sample of its own
        await session.until("delivered", "delivered")
        assert (await session.ledger())["sampled"] == len(SLOW.ids) + len(SECOND.ids)


async def test_a_repeat_joins_the_turn_in_flight_and_hears_all_of_it() -> None:
    engine = Counting(SLOW)
    async with listening(engine) as client:
        session = await client.open()
        await leave(session, ASK_STREAM, after=b'"content":"a')
        status, _, body = await session.ask(ASK_STREAM)
        assert (status, streamed(body), body.endswith(b"[DONE]\n\n")) == (200, "a slow answer of some length", True)
        assert len(engine.asked) == 1
        await session.until("delivered")


async def test_a_repeat_that_allows_more_is_not_given_a_turn_that_was_cut_short() -> None:
    async with listening([SLOW, say(RENDERING, "a slow"), FIRST]) as client:
        session = await client.open()
        await leave(session, chat_body("hello", max_tokens=3), after=b"")
        await session.until("undelivered")
        assert content(await session.ask(chat_body("hello", max_tokens=50))) == "a slow"
        _, _, body = await session.ask(chat_body("hello", max_tokens=2))
        assert json.loads(body)["usage"]["completion_tokens"] == 3  # the one that nobody got, whole
        await session.until("delivered", "delivered")


async def test_equal_calls_at_once_are_samples_of_their_own() -> None:
    engine = Counting(*[SLOW] * 4)
    async with listening(engine) as client:
        session = await client.open()
        answers = await asyncio.gather(*[session.ask(ASK) for _ in range(4)])
        assert [content(answer) for answer in answers] == ["a slow answer of some length"] * 4
        await session.until(*["delivered"] * 4)
        assert len(engine.asked) == 4


@pytest.mark.parametrize("settings", [{"on_disconnect": "abort"}, {"disconnect_timeout_s": 0.05}])
async def test_a_turn_that_nobody_waits_for_is_aborted_on_the_engine(settings: dict[str, Any]) -> None:
    engine = Counting(SLOW, SECOND)
    async with listening(engine, **settings) as client:
        session = await client.open()
        await leave(session, ASK_STREAM, after=b'"content":"a')
        await becomes(lambda: engine.closed == 1)
        ledger = await session.ledger()
        assert ledger["dropped"] == {"aborted": ledger["sampled"]}
        assert 0 < ledger["sampled"] < len(SLOW.ids)
        assert content(await session.ask(ASK)) == "the second"


async def test_what_the_admin_samples_without_a_session_is_never_shared() -> None:
    engine = Counting(SLOW, SECOND)
    async with listening(engine) as client:
        url = f"{client.gateway.url}/v1/chat/completions"
        reader, writer = await Session(client, "", "admin").connect(ASK_STREAM, "/../../v1/chat/completions")
        await asyncio.wait_for(reader.readuntil(b'"content":"a'), 20)
        writer.close()
        await becomes(lambda: engine.closed == 1)
        assert content(await client.send("POST", url.removeprefix(client.gateway.url), ASK)) == "the second"


# --- sessions ------------------------------------------------------------------------------------------------------


async def test_sealing_ends_what_is_in_flight_and_tells_its_client() -> None:
    async with listening([SLOW], seal_timeout_s=0.05) as client:
        session = await client.open()
        asked = asyncio.create_task(session.ask(ASK))
        await becomes(lambda: len(client.gateway.sessions.find(session.id).tasks) == 1)
        await client.json("POST", f"/sessions/{session.id}/seal", {})
        status, headers, _ = await asked
        assert (status, headers["x-should-retry"]) == (409, "false")
        assert set((await session.ledger())["dropped"]) <= {"aborted"}
        assert await session.turns() == []


async def test_limits_on_turns_and_tokens_are_told_once_and_for_all() -> None:
    limits: list[dict[str, Any]] = [{"session_max_turns": 1}, {"session_max_tokens": 3}]
    for limit in limits:
        async with listening([FIRST, SECOND], **limit) as client:
            session = await client.open()
            assert content(await session.ask(ASK)) == "the first"
            status, headers, body = await session.ask(ASK)
            assert (status, headers["x-should-retry"]) == (400, "false")
            assert json.loads(body)["error"]["code"] == "session_limit_exceeded"
            assert next(iter(limit)).encode() in body


async def test_choices_are_siblings_in_one_commit() -> None:
    script = [say(RENDERING, f"choice {n}") for n in range(3)]
    async with listening([*script, FIRST]) as client:
        session = await client.open()
        status, _, body = await session.ask(chat_body("hello", n=3))
        choices = json.loads(body)["choices"]
        assert (status, [choice["index"] for choice in choices]) == (200, [0, 1, 2])
        said = [choice["message"]["content"] for choice in choices]
        assert sorted(said) == [f"choice {n}" for n in range(3)]
        assert json.loads(body)["usage"]["completion_tokens"] == sum(len(line.ids) for line in script)
        echoed = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": said[1]}]
        follow_up = json.dumps({"messages": [*echoed, {"role": "user", "content": "go on"}]}).encode()
        assert content(await session.ask(follow_up)) == "the first"
        tree = await client.json("GET", f"/sessions/{session.id}/tree")
        nodes = {node["id"]: node for node in tree["nodes"]}
        assert len({nodes[turn["node"]]["parent"] for turn in tree["turns"][:3]}) == 1
        adopted = nodes[nodes[tree["turns"][3]["node"]]["parent"]]["parent"]
        assert adopted == tree["turns"][1]["node"]
        assert await client.json("GET", f"/sessions/{session.id}/drift") == []


@pytest.mark.parametrize(("unadopted", "num_samples"), [("drop", 1), ("keep", 2)])
async def test_samples_are_what_the_settings_select(unadopted: str, num_samples: int) -> None:
    script = [say(RENDERING, "one"), say(RENDERING, "two"), FIRST]
    async with listening(script, select={"unadopted": unadopted}) as client:
        session = await client.open()
        _, _, body = await session.ask(chat_body("hello", n=2))
        said = json.loads(body)["choices"][0]["message"]["content"]
        echoed = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": said}]
        await session.ask(json.dumps({"messages": [*echoed, {"role": "user", "content": "go on"}]}).encode())
        assert len(await client.json("GET", f"/sessions/{session.id}/samples")) == num_samples


async def test_choices_have_seeds_of_their_own_and_say_so() -> None:
    engine = Counting(FIRST, SECOND)
    async with listening(engine) as client:
        session = await client.open()
        assert (await session.ask(chat_body("hello", n=2, seed=7)))[0] == 200
        assert sorted(request.sampling.seed or 0 for request in engine.asked) == [7, 8]
        turns = client.gateway.store.tree(session.id).turns.values()
        assert [turn.sampling.seed for turn in turns] == [7, 8]


async def test_a_choice_that_fails_fails_them_all() -> None:
    script = [say(RENDERING, "one"), say(RENDERING, "two is cut", fault="cut")]
    async with listening(script) as client:
        session = await client.open()
        status, _, _ = await session.ask(chat_body("hello", n=2))
        assert status == 502
        assert await session.turns() == []
        assert set((await session.ledger())["dropped"]) == {"engine_failed"}


async def test_streamed_choices_are_told_apart() -> None:
    async with listening([say(RENDERING, "one"), say(RENDERING, "two")]) as client:
        session = await client.open()
        _, _, body = await session.ask(chat_body("hello", n=2, stream=True))
        said = {0: "", 1: ""}
        for line in body.split(b"\n"):
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                said[choice["index"]] += choice["delta"].get("content") or ""
        assert sorted(said.values()) == ["one", "two"]
        assert body.count(b'"finish_reason":"stop"') == 2


async def test_sessions_at_once_never_see_each_others_tokens() -> None:
    names = [f"session number {n}" for n in range(12)]
    script = [say(RENDERING, f"for {name} alone", when=f"{name}.", fault="pace:0.001") for name in names]
    async with listening(script) as client:
        sessions = [await client.open() for _ in names]
        asked = [
            session.ask(chat_body(f"I am {name}.", stream=True)) for session, name in zip(sessions, names, strict=True)
        ]
        answers = await asyncio.gather(*asked)
        for session, name, (_, _, body) in zip(sessions, names, answers, strict=True):
            assert streamed(body) == f"for {name} alone"
            (sample,) = await client.json("GET", f"/sessions/{session.id}/samples")
            ids = [id for id, mask in zip(sample["ids"], sample["loss_mask"], strict=True) if mask]
            assert ids == RENDERING.encode_reply(Reply(f"for {name} alone")).tolist()


async def test_a_long_call_that_is_new_is_rendered_without_holding_others_up() -> None:
    function = {"name": "f", "arguments": json.dumps({"text": "word " * 100_000})}
    said = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "the first"},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    async with listening([FIRST, SECOND]) as client:
        session = await client.open()
        assert content(await session.ask(ASK)) == "the first"
        loop = asyncio.get_running_loop()
        began = loop.time()
        asked = asyncio.create_task(session.ask(json.dumps({"model": "m", "messages": said}).encode()))
        ticks = [began]
        while not asked.done():
            await asyncio.sleep(0.001)
            ticks.append(loop.time())
        assert content(await asked) == "the second"
        assert max(b - a for a, b in pairwise(ticks)) < (ticks[-1] - began) / 2
