"""Addresses, keys and fields that are nearly right are told what would be; what is refused is never passed on."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from stenograph.engines.scripted import Line, ScriptedEngine
from support.listening import CHAT, becomes, chat_body, listening, rendering, say

HELLO = say(rendering(), "hello there")
SLOW = Line(HELLO.ids, fault="pace:5")
GENERATION = (CHAT, "/v1/messages", "/v1/responses")


class Served(ScriptedEngine):
    """A script beside a server, which keeps what reached it."""

    def __init__(self, url: str, reached: list[str]) -> None:
        super().__init__([HELLO])
        self._url = url
        self.reached = reached

    @property
    def server(self) -> str:  # type: ignore[override]
        return self._url


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    reached: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        reached.append(f"{request.method} {request.path}")
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield Served(f"http://127.0.0.1:{runner.addresses[0][1]}", reached)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("path", "address"),
    [*((address.removeprefix("/v1"), address) for address in GENERATION), ("/v1/v1/messages", "/v1/messages")],
)
async def test_a_v1_that_is_forgotten_or_doubled_is_told(path: str, address: str) -> None:
    async with served() as engine:
        for kind in ([HELLO], engine):
            async with listening(kind) as client:
                session = await client.open()
                status, headers, body = await session.ask(chat_body("hello"), path)
                assert (status, headers["x-should-retry"]) == (404, "false")
                told = json.loads(body)["error"]["message"]
                assert f"did you mean {address}?" in told
                assert "OpenAI base URL ends in /v1" in told
                assert "Anthropic base URL has no /v1" in told
        assert engine.reached == []


async def test_an_address_that_is_nearly_right_answers_in_its_protocol() -> None:
    async with listening([HELLO]) as client:
        session = await client.open()
        assert json.loads((await session.ask(b"{}", "/v1/v1/messages"))[2])["type"] == "error"
        assert "type" not in json.loads((await session.ask(b"{}", "/v1/v1/chat/completions"))[2])


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_a_generation_address_answers_post_alone(method: str) -> None:
    async with served() as engine:
        for kind in ([HELLO], engine):
            async with listening(kind) as client:
                session = await client.open()
                key = {"authorization": f"Bearer {session.api_key}"}
                for address in GENERATION:
                    for path in (address, f"/s/{session.id}{address}"):
                        status, headers, body = await client.send(method, path, b"{}", key)
                        assert (status, headers["x-should-retry"], headers["allow"]) == (405, "false", "POST")
                        assert "POST alone" in json.loads(body)["error"]["message"]
                        assert ("type" in json.loads(body)) == (address == "/v1/messages")
        assert engine.reached == []


async def test_the_admin_key_has_everything_passed() -> None:
    async with served() as engine, listening(engine) as client:
        for sent in ("GET /v1/messages", "POST /chat/completions", "POST /v1/v1/messages"):
            method, path = sent.split()
            assert (await client.send(method, path, b"{}"))[0] == 200
            assert engine.reached.pop() == sent


async def test_a_key_that_does_not_open_an_address_is_told_which_does() -> None:
    async with listening([HELLO]) as client:
        mine, other = await client.open(), await client.open()
        key = {"authorization": f"Bearer {mine.api_key}"}
        for path, status, told in [
            (f"/s/{other.id}{CHAT}", 403, "the id is mistyped"),
            (f"/s/{mine.id}x{CHAT}", 403, "the id is mistyped"),
            ("/sessions", 403, "STENO_ADMIN_KEY"),
            ("/v1/load_lora_adapter", 403, "STENO_ADMIN_KEY"),
        ]:
            answered, _, body = await client.send("POST", path, chat_body("hello"), key)
            assert answered == status
            assert told in json.loads(body)["error"]["message"]
        status, _, body = await client.send("GET", "/sessions/steno_gone")
        assert status == 404
        assert "POST /sessions opens one" in json.loads(body)["error"]["message"]


async def test_a_stale_key_beside_a_valid_one_shuts_nothing() -> None:
    async with listening([HELLO, HELLO]) as client:
        gone, mine = await client.open(), await client.open()
        other = await client.open()
        await client.json("DELETE", f"/sessions/{gone.id}")
        for stale in (gone.api_key, other.api_key, "sk-ant-of-the-user"):
            keys = {"authorization": f"Bearer {stale}", "x-api-key": mine.api_key}
            assert (await client.send("GET", f"/s/{mine.id}/v1/models", None, keys))[0] == 200
            keys = {"authorization": f"Bearer {stale}", "x-api-key": "admin"}
            assert (await client.send("GET", f"/sessions/{mine.id}", None, keys))[0] == 200
        keys = {"authorization": f"Bearer {gone.api_key}", "x-api-key": mine.api_key}
        assert (await client.send("POST", CHAT, chat_body("hello"), keys))[0] == 200
        assert len(await mine.turns()) == 1
        keys = {"authorization": f"Bearer {gone.api_key}", "x-api-key": "wrong"}
        assert (await client.send("POST", CHAT, chat_body("hello"), keys))[0] == 401


async def test_health_needs_no_key() -> None:
    async with listening([HELLO]) as client:
        session = await client.open()
        none = {"authorization": ""}
        assert (await client.send("GET", "/healthz", None, none))[0] == 200
        for path in ("/", "/api/hello", f"/s/{session.id}", f"/s/{session.id}/api/hello"):
            assert (await client.send("HEAD", path, None, none))[0] == 200
        assert (await client.send("HEAD", "/v1/models", None, none))[0] == 401
        assert (await client.send("GET", "/v1/models", None, none))[0] == 401


@pytest.mark.parametrize("field", ["rewards", "trace", "Reward"])
async def test_a_field_that_nobody_reads_is_refused(field: str) -> None:
    async with listening([HELLO]) as client:
        session = await client.open()
        for path, known in (("/sessions", "traced, ttl_s, metadata"), (f"/sessions/{session.id}/seal", "reward")):
            status, _, body = await client.send("POST", path, json.dumps({field: 1}).encode())
            assert status == 400
            told = json.loads(body)["error"]["message"]
            assert told.startswith(f"{field}: unknown field")
            assert known in told
        assert (await client.json("GET", f"/sessions/{session.id}"))["state"] == "open"


async def test_an_untraced_session_counts_what_it_sampled() -> None:
    async with listening([HELLO, HELLO]) as client:
        session = await client.open(traced=False)
        for _ in range(2):
            assert (await session.ask(chat_body("hello")))[0] == 200
        info = await client.json("GET", f"/sessions/{session.id}")
        assert (info["num_turns"], info["num_tokens"]) == (2, 2 * len(HELLO.ids))


async def test_a_body_that_cannot_be_decoded_is_nothing_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "stenograph")
    cut = bytearray(gzip.compress(chat_body("hello")))
    cut[12] ^= 0xFF
    async with listening([HELLO]) as client:
        session = await client.open()
        for body in (b"no gzip at all", bytes(cut)):
            headers = {"authorization": f"Bearer {session.api_key}", "content-encoding": "gzip"}
            assert (await client.send("POST", CHAT, body, headers))[0] == 400
    assert [record.getMessage() for record in caplog.records if record.name.startswith("stenograph")] == []


@pytest.mark.parametrize("traced", [True, False])
async def test_what_the_gateways_end_cuts_short_may_be_tried_again(traced: bool) -> None:
    async with listening([SLOW, SLOW]) as client:
        session = await client.open(traced=traced)
        whole = asyncio.create_task(session.ask(chat_body("hello")))
        streamed = asyncio.create_task(session.raw(chat_body("hello", stream=True)))
        await becomes(lambda: len(client.gateway.sessions.find(session.id).tasks) == 2)
        await client.gateway.stop()
        status, headers, body = await whole
        assert (status, headers.get("x-should-retry"), headers["retry-after"]) == (503, None, "1")
        assert "shutting down" in json.loads(body)["error"]["message"]
        assert b"shutting down" in await streamed
        assert b"[DONE]" not in await streamed


@pytest.mark.parametrize(
    ("settings", "base"),
    [
        ({"host": "0.0.0.0"}, "http://127.0.0.1:PORT"),
        ({"host": "::"}, "http://[::1]:PORT"),
        ({"host": "0.0.0.0", "public_url": "https://steno.example/here/"}, "https://steno.example/here"),
        ({"public_url": "https://steno.example"}, "https://steno.example"),
    ],
)
async def test_the_address_of_a_session_can_be_reached(settings: dict[str, Any], base: str) -> None:
    async with listening([HELLO], **settings) as client:
        opened = await client.json("POST", "/sessions", {})
        port = client.gateway.url.rpartition(":")[2]
        assert opened["base_url"] == f"{base.replace('PORT', port)}/s/{opened['id']}"
