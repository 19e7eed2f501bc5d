"""What fails in ways that nobody planned: it is told as an error, accounted for, and harms nothing beside it."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from stenograph.engines.base import Chunk, Generate
from stenograph.engines.scripted import Line, ScriptedEngine
from stenograph.errors import TraceError
from stenograph.gateway.calls import Call
from stenograph.traces.memory import MemoryTraceStore
from stenograph.traces.trace import TurnState
from support.listening import CHAT, Session, becomes, chat_body, listening, rendering, say

RENDERING = rendering()
FIRST, SECOND = say(RENDERING, "the first"), say(RENDERING, "the second")
SLOW = say(RENDERING, "a slow answer of some length", fault="pace:0.01")


# --- the engine ----------------------------------------------------------------------------------------------------


class Raising(ScriptedEngine):
    """Fails after some tokens, with an error that is none of ours."""

    def __init__(self, exception: BaseException, num_tokens: int, *script: Line) -> None:
        super().__init__(list(script))
        self._exception, self._num_tokens = exception, num_tokens

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        num_tokens = 0
        async for chunk in super().generate(request):
            if num_tokens == self._num_tokens:
                raise self._exception
            num_tokens += 1
            yield chunk


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("num_tokens", [0, 15])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "exception",
    [ConnectionResetError("by peer"), TimeoutError("late"), ValueError("bad"), asyncio.CancelledError()],
    ids=lambda exception: type(exception).__name__,
)
async def test_an_engine_may_raise_anything(
    exception: BaseException, stream: bool, num_tokens: int, num_choices: int
) -> None:
    async with listening(Raising(exception, num_tokens, SLOW, SLOW)) as client:
        session = await client.open()
        raw = await session.raw(chat_body("hello", stream=stream, n=num_choices))
        if stream and num_tokens:
            assert b'data: {"error"' in raw
            assert b"[DONE]" not in raw
            assert not raw.endswith(b"0\r\n\r\n")
        else:
            assert b" 502 " in raw.split(b"\r\n")[0]
        assert await session.turns() == []
        ledger = await session.ledger()
        assert set(ledger["dropped"]) == ({"engine_failed"} if num_tokens else set())


class Aborting(ScriptedEngine):
    """Gives up with its last tokens in hand."""

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        ids = FIRST.ids[:3]
        yield Chunk(ids, np.zeros(len(ids), np.float32), 0, "abort")


async def test_tokens_that_come_with_an_abort_are_accounted_for() -> None:
    async with listening(Aborting([])) as client:
        session = await client.open()
        assert (await session.ask(chat_body("hello")))[0] == 503
        assert (await session.ledger())["dropped"] == {"aborted": 3}


# --- the store -----------------------------------------------------------------------------------------------------


class Unmarked(MemoryTraceStore):
    """A store that takes turns, and nothing that is said of them later."""

    def mark(self, session: str, turns: Iterable[str], state: TurnState) -> None:
        raise OSError("no space left on device")

    def seal(
        self,
        session: str,
        reward: float | None = None,
        status: str | None = None,
        turn_rewards: Sequence[float] = (),
    ) -> None:
        raise OSError("no space left on device")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_is_recorded_is_answered_whether_or_not_it_can_be_marked(stream: bool) -> None:
    async with listening([SLOW, SECOND], Unmarked()) as client:
        session = await client.open()
        _, writer = await session.connect(chat_body("hello"))  # leaves, and is not served
        held = client.gateway.sessions.find(session.id)
        await becomes(lambda: len(held.tasks) == 1)
        task = next(iter(held.tasks))
        writer.close()
        await becomes(task.done)
        assert task.exception() is None
        raw = await session.raw(chat_body("hello", stream=stream))
        assert raw.count(b"HTTP/1.1") == 1
        assert b'"error"' not in raw
        assert held.calls == {}


async def test_a_session_that_cannot_be_sealed_does_not_end_the_expiry_of_others() -> None:
    async with listening([], Unmarked(), session_ttl_s=0.02) as client:
        for _ in range(3):
            session = client.gateway.sessions.find((await client.open()).id)
            await becomes(lambda session=session: session.state == "sealed")


class Unreleased(MemoryTraceStore):
    """A store that cannot let go at first."""

    failed = False

    def release(self, sessions: Iterable[str]) -> list[str]:
        if not self.failed:
            self.failed = True
            raise OSError("the disk is busy")
        return super().release(sessions)


@pytest.mark.parametrize("num_at_once", [1, 2])
async def test_a_session_is_released_once_after_any_failure(num_at_once: int) -> None:
    async with listening([SLOW], store := Unreleased()) as client:
        session = await client.open()
        asked = asyncio.create_task(session.ask(chat_body("hello")))
        await becomes(lambda: len(client.gateway.sessions.find(session.id).tasks) == 1)
        assert (await client.send("DELETE", f"/sessions/{session.id}"))[0] == 500
        assert (await asked)[0] == 409
        deleted = [client.json("DELETE", f"/sessions/{session.id}") for _ in range(num_at_once)]
        released = [id for answer in await asyncio.gather(*deleted) for id in answer["released"]]
        assert released == [session.id]
        with pytest.raises(TraceError):
            store.get(session.id)


# --- the client ----------------------------------------------------------------------------------------------------


async def test_choices_in_flight_count_as_turns() -> None:
    async with listening([SLOW] * 12, session_max_turns=10) as client:
        session = await client.open()
        answers = await asyncio.gather(*[session.ask(chat_body("hello", n=4)) for _ in range(3)])
        assert sorted(status for status, _, _ in answers) == [200, 200, 400]
        assert len(await session.turns()) == 8


async def leave_undelivered(session: Session) -> Call:
    """A call that its client left in mid-stream and that was taken to its end."""
    reader, writer = await session.connect(chat_body("hello", stream=True))
    async with asyncio.timeout(20):
        await reader.readuntil(b'"content":"a')
    writer.close()
    await session.until("undelivered")
    held = session.client.gateway.sessions.find(session.id)
    return next(iter(held.calls.values()))[0]


async def test_a_call_that_nobody_can_be_given_any_more_is_forgotten() -> None:
    async with listening([SLOW, SLOW]) as client:
        delivered, sealed = await client.open(), await client.open()
        calls = [weakref.ref(await leave_undelivered(session)) for session in (delivered, sealed)]
        assert (await delivered.ask(chat_body("hello")))[0] == 200
        await client.json("POST", f"/sessions/{sealed.id}/seal", {})
        await becomes(lambda: gc.collect() >= 0 and [call() for call in calls] == [None, None])


async def test_a_response_that_is_to_be_stored_is_not_answered_by_a_turn_that_is_not() -> None:
    async with listening([SLOW, FIRST, SECOND]) as client:
        session = await client.open()
        await leave_undelivered(session)
        asked = {"input": "hello", "store": True}
        said = json.loads((await session.ask(json.dumps(asked).encode(), "/v1/responses"))[2])
        asked = {"input": "go on", "previous_response_id": said["id"]}
        assert (await session.ask(json.dumps(asked).encode(), "/v1/responses"))[0] == 200


def deep(depth: int) -> Mapping[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"properties": schema}
    return schema


@pytest.mark.parametrize("depth", [250, 251, 252, 253, 254, 255])
async def test_tools_of_any_depth_are_taken_or_refused(depth: int) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": deep(depth)}}
    async with listening([FIRST]) as client:
        session = await client.open()
        assert (await session.ask(chat_body("hello", tools=[tool])))[0] in (200, 400)


async def exchange(url: str, request: bytes) -> bytes:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(request)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize("path", [CHAT, "/v1/messages/count_tokens"])
async def test_a_session_that_is_deleted_while_a_body_arrives_is_unknown(path: str) -> None:
    async with listening([]) as client:
        session = await client.open()
        head = f"POST /s/{session.id}{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session.api_key}\r\n"
        address, body = urlsplit(client.gateway.url), chat_body("hello")
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(f"{head}expect: 100-continue\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        async with asyncio.timeout(20):
            assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.05)  # until the body is waited for
            await client.json("DELETE", f"/sessions/{session.id}")
            writer.write(body)
            assert b" 404 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    "request_of",
    [
        b"POST /v1/messages HTTP/1.1\r\nx-api-key: %s\x00\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nx-api-key %s\r\n\r\n",
        b"POST /v1/messages %s\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nx-api-key: %s" + b"a" * 20_000 + b"\r\n\r\n",
    ],
)
async def test_a_key_in_a_request_that_is_no_http_is_not_logged(
    request_of: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with listening([]) as client:
            session = await client.open()
            assert b" 400 " in await exchange(client.gateway.url, request_of % session.api_key.encode())
    assert "Error handling request" in caplog.text
    assert session.api_key not in caplog.text


async def test_a_request_may_name_the_host_as_one_to_a_proxy_does() -> None:
    async with listening([FIRST]) as client:
        session, body = await client.open(), chat_body("hello")
        head = f"POST http://any.host{CHAT}?beta=true HTTP/1.1\r\nhost: any.host\r\nconnection: close\r\n"
        head += f"authorization: Bearer {session.api_key}\r\ncontent-length: {len(body)}\r\n\r\n"
        answer = await exchange(client.gateway.url, head.encode() + body)
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] == "the first"
