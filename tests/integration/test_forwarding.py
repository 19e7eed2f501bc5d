"""Whichever gateway of a journal a request comes to: it is answered as the one that has its session answers it."""

from __future__ import annotations

import asyncio
import gzip
import json
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from stenograph.engines.scripted import ScriptedEngine
from stenograph.traces.journal import Journal
from support.listening import CHAT, Client, becomes, chat_body, rendering, say
from support.streams import assembled
from support.together import at, gateway, gateways
from support.wires import PATHS, Protocol, read

R = rendering()


def engine() -> ScriptedEngine:
    return ScriptedEngine([
        say(R, "It rains.", when="weather"),
        say(R, "One word after the other, at some length.", when="slow", fault="pace:0.01"),
        say(R, "never", when="hang", fault="hang"),
        say(R, "half of this", when="cut", fault="cut"),
    ])  # fmt: skip


def said(text: str, **fields: object) -> bytes:
    """A body that all three protocols read."""
    asked = [{"role": "user", "content": text}]
    return json.dumps({"model": "m", "messages": asked, "input": asked, "max_tokens": 90, **fields}).encode()


@pytest.mark.parametrize("protocol", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_the_same_wherever_it_is_asked(tmp_path: Path, protocol: Protocol, stream: bool) -> None:
    async with gateways(tmp_path / "traces.db", engine) as (here, there):
        session = await here.open()
        body = said("weather", stream=stream)
        answers = [await at(client, session).ask(body, PATHS[protocol]) for client in (here, there)]
        (status, headers, direct), (_, passed_headers, passed) = answers
        assert status == 200
        (reply,) = read(protocol, assembled(protocol, passed) if stream else json.loads(passed))
        assert reply.texts == ("It rains.",)
        unnamed = ("x-request-id", "request-id", "date", "content-length")
        assert {k: v for k, v in headers.items() if k.lower() not in unnamed} == {
            k: v for k, v in passed_headers.items() if k.lower() not in unnamed
        }
        assert len(direct) == len(passed)
        await session.until("delivered", "delivered")


async def test_a_session_is_found_by_path_key_header_and_body(tmp_path: Path) -> None:
    async with gateways(tmp_path / "traces.db", engine) as (here, there):
        session = await here.open()
        own = {"authorization": f"Bearer {session.api_key}"}
        ways = [
            (f"/s/{session.id}{CHAT}", {}, {}),
            (f"/s/{session.id}{CHAT}", own, {}),
            (CHAT, own, {}),
            (CHAT, {"x-session-id": session.id}, {}),
            (CHAT, {}, {"session_id": session.id}),
            (f"/s/{session.id}/./v1//chat/%63ompletions", own, {}),
        ]
        for path, headers, fields in ways:
            status, _, body = await there.send("POST", path, chat_body("weather", **fields), headers)
            assert status == 200, body
        compressed = gzip.compress(chat_body("weather"))
        status, _, body = await there.send("POST", CHAT, compressed, {**own, "content-encoding": "gzip"})
        assert status == 200, body
        assert len(await at(there, session).turns()) == len(ways) + 1
        status, _, body = await there.send("POST", "/v1/messages/count_tokens", said("weather"), own)
        assert (status, json.loads(body)["input_tokens"] > 0) == (200, True)


async def test_keys_open_what_they_open_wherever_they_are_shown(tmp_path: Path) -> None:
    async with gateways(tmp_path / "traces.db", engine) as (here, there):
        session, other = await here.open(), await there.open()
        for client in (here, there):
            for headers, expected in (
                ({"authorization": f"Bearer {other.api_key}"}, 403),
                ({"authorization": "Bearer no"}, 401),
                ({"authorization": "Bearer no", "x-steno-rights": "admin"}, 401),  # what gateways say to one another
            ):
                status, _, _ = await client.send("POST", f"/s/{session.id}{CHAT}", chat_body("weather"), headers)
                assert status == expected
            status, _, body = await client.send(
                "POST", f"/s/{session.id}/v1/load_lora_adapter", b"{}", {"authorization": f"Bearer {session.api_key}"}
            )
            assert (status, b"controls the engine" in body) == (403, True)


async def test_the_admin_of_one_gateway_reaches_what_another_has(tmp_path: Path) -> None:
    journal = tmp_path / "traces.db"
    async with gateway(journal, engine(), "mine") as here, gateway(journal, engine(), "theirs") as there:
        session = await here.open()
        assert (await at(there, session).ask(chat_body("weather")))[0] == 200
        assert (await there.send("POST", f"/s/{session.id}{CHAT}", chat_body("weather")))[0] == 200
        assert (await there.json("GET", f"/sessions/{session.id}"))["num_turns"] == 2
        refused = {"authorization": "Bearer mine"}
        assert (await there.send("GET", f"/sessions/{session.id}", None, refused))[0] == 401
        assert (await there.json("POST", f"/sessions/{session.id}/seal", {"reward": 1}))["state"] == "sealed"
        assert (await at(there, session).ask(chat_body("weather")))[0] == 409
        (sample, _) = await there.json("GET", f"/sessions/{session.id}/samples")
        assert sample["reward"] == 1
        assert (await there.json("GET", f"/sessions/{session.id}/ledger"))["in_flight"] > 0
        assert await there.json("DELETE", f"/sessions/{session.id}") == {"released": [session.id]}
        assert await there.json("DELETE", f"/sessions/{session.id}") == {"released": []}
        assert (await here.send("GET", f"/sessions/{session.id}"))[0] == 404


async def test_an_untraced_session_has_one_address_too(tmp_path: Path) -> None:
    async with gateways(tmp_path / "traces.db", engine) as (here, there):
        session = await here.open(traced=False)
        assert (await at(there, session).ask(chat_body("weather")))[0] == 200
        assert (await here.json("GET", f"/sessions/{session.id}"))["num_turns"] == 1


@pytest.mark.parametrize("path", PATHS.values())
async def test_errors_have_the_shape_of_their_protocol(tmp_path: Path, path: str) -> None:
    async with gateways(tmp_path / "traces.db", engine) as (here, there):
        session = await here.open()
        for body in (b"{", said("nothing that is known")):
            (status, _, direct), (passed_status, _, passed) = [
                await at(client, session).ask(body, path) for client in (here, there)
            ]
            assert (status, direct) == (passed_status, passed)
            assert status >= 400
        stream = said("cut", stream=True)
        direct, passed = [await at(client, session).raw(stream, path) for client in (here, there)]
        assert b"cut short" in passed or b"ended" in passed
        assert passed.count(b"error") == direct.count(b"error")
        assert not passed.endswith(b"0\r\n\r\n")


async def test_equal_calls_at_once_are_a_sample_each(tmp_path: Path) -> None:
    async with gateways(tmp_path / "traces.db", engine) as (here, there):
        session = await here.open()
        answers = await asyncio.gather(*(at(client, session).ask(chat_body("slow")) for client in (here, there) * 2))
        assert [status for status, _, _ in answers] == [200] * 4
        assert len(await session.turns()) == 4
        await session.until(*["delivered"] * 4)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_goes_away_and_asks_again_gets_the_same_turn(tmp_path: Path, stream: bool) -> None:
    async with gateways(tmp_path / "traces.db", engine) as (here, there):
        session = await here.open()
        _, writer = await at(there, session).connect(chat_body("slow", stream=stream))
        calls = here.gateway.sessions.find(session.id).calls
        await becomes(lambda: any(call.has_client for same in calls.values() for call in same))
        writer.close()
        await becomes(lambda: not any(call.has_client for same in calls.values() for call in same))
        status, _, body = await at(there, session).ask(chat_body("slow", stream=stream))
        assert (status, len(await session.turns())) == (200, 1)
        reply = assembled("chat", body) if stream else json.loads(body)
        assert reply["choices"][0]["message"]["content"] == "One word after the other, at some length."
        await session.until("delivered")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_is_delivered_once_the_forwarding_gateway_says_so(tmp_path: Path, stream: bool) -> None:
    async with gateways(tmp_path / "traces.db", engine) as (here, _):
        session = await here.open()
        url = f"http://x/s/{session.id}{CHAT}"
        body, rights = chat_body("weather", stream=stream), {"x-steno-rights": "admin"}
        async with AsyncExitStack() as stack:
            ends = [await stack.enter_async_context(unix(here)) for _ in range(3)]
            receipts = []
            for end in ends:  # all of it arrived here, and at no client: who asks the same is a sibling
                async with end.post(url, data=body, headers=rights) as answer:
                    assert await answer.read()
                    receipts.append(answer.headers["x-steno-receipt"])
            await session.until("committed", "committed", "committed")
            async with unix(here) as http, http.post("http://x/", headers={"x-steno-receipt": receipts[1]}):
                await session.until("committed", "delivered", "committed")
            await ends[2].close()
            await session.until("committed", "delivered", "undelivered")
            assert (await session.ask(body))[0] == 200  # what nobody had is had now
            await session.until("committed", "delivered", "delivered")


async def test_a_session_that_is_deleted_at_once_keeps_what_was_delivered(tmp_path: Path) -> None:
    async with gateways(tmp_path / "traces.db", engine) as (here, _):
        session = await here.open()
        url = f"http://x/s/{session.id}{CHAT}"
        async with unix(here) as end, unix(here) as other:
            async with end.post(url, data=chat_body("weather"), headers={"x-steno-rights": "admin"}) as answer:
                assert await answer.read()
            deleted = asyncio.create_task(here.json("DELETE", f"/sessions/{session.id}"))
            await becomes(lambda: session.id in here.gateway.sessions._closing)
            async with other.post("http://x/", headers={"x-steno-receipt": answer.headers["x-steno-receipt"]}):
                assert await deleted == {"released": [session.id]}
        with Journal.reading(tmp_path / "traces.db") as journal:
            tree = journal.load(session.id).tree
    assert [tree.state(turn) for turn in tree.turns] == ["delivered"]


def unix(client: Client) -> aiohttp.ClientSession:
    """As another gateway speaks to one."""
    return aiohttp.ClientSession(connector=aiohttp.UnixConnector(client.gateway.address))


async def test_what_is_auxiliary_goes_by_the_session_to_the_engine_and_back(tmp_path: Path) -> None:
    seen: list[tuple[str, str, bytes, str | None]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append((request.method, request.raw_path, await request.read(), request.headers.get("x-of-the-client")))
        if request.method == "DELETE":
            return web.Response(status=204)
        return web.Response(status=203, body=b"\x00\xff" * 50_000, headers={"x-of-the-server": "1"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with (
        TestServer(app) as server,
        gateways(tmp_path / "traces.db", lambda: WithServer(str(server.make_url("")))) as both,
    ):
        session = await both[0].open()
        for method, path in (("POST", "/v1/a%20b%2Fc?x=%2F&y=%C3%A9"), ("HEAD", "/v1/head"), ("DELETE", "/v1/gone")):
            answers = []
            for client in both:
                body = b"any bytes \xff" if method == "POST" else None
                key = {"authorization": f"Bearer {session.api_key}", "x-of-the-client": "1"}
                status, headers, got = await client.send(method, f"/s/{session.id}{path}", body, key)
                answers.append((status, headers.get("x-of-the-server"), headers.get("content-length"), got))
            assert answers[0] == answers[1]
            assert seen[-2] == seen[-1]


class WithServer(ScriptedEngine):
    def __init__(self, url: str) -> None:
        super().__init__([])
        self._url = url

    @property
    def server(self) -> str:  # type: ignore[override]
        return self._url


async def test_no_request_is_forwarded_twice(tmp_path: Path) -> None:
    async with gateways(tmp_path / "traces.db", engine) as (here, there):
        session = await here.open()
        async with unix(there) as http:
            asked = http.post(
                f"http://x/s/{session.id}{CHAT}", data=chat_body("weather"), headers={"x-steno-rights": "admin"}
            )
            async with asked as answer:
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")


async def test_a_gateway_that_is_gone_leaves_its_sessions_to_who_is_asked(tmp_path: Path) -> None:
    journal = tmp_path / "traces.db"
    async with gateway(journal, engine()) as there:
        async with gateway(journal, engine()) as here:
            session = await here.open()
            status, _, body = await session.ask(chat_body("weather"))
            assert status == 200
            node = (await session.turns())[0]["node"]
        reply = json.loads(body)["choices"][0]["message"]["content"]
        messages = [{"role": "user", "content": "weather"}, {"role": "assistant", "content": reply}]
        messages.append({"role": "user", "content": "and the weather tomorrow?"})
        assert (await at(there, session).ask(json.dumps({"messages": messages}).encode()))[0] == 200
        first, second = await at(there, session).turns()
        assert (first["node"], second["parent"], second["extends"]) == (node, first["id"], True)
        assert await there.json("GET", f"/sessions/{session.id}/drift") == []
        assert there.gateway.sessions.find(session.id).num_turns == 2


async def test_a_gateway_that_lost_a_session_answers_by_the_one_that_has_it(tmp_path: Path) -> None:
    async with gateways(tmp_path / "traces.db", engine) as (here, there):
        session = await here.open()
        assert (await session.ask(chat_body("weather")))[0] == 200
        owner = there.gateway.store._owner.id  # type: ignore[attr-defined]
        here.gateway.store._journal._run("UPDATE sessions SET owner = ?", owner)  # type: ignore[attr-defined]
        assert (await session.ask(chat_body("weather")))[0] == 200
        assert session.id not in here.gateway.sessions._sessions
        assert len(await at(there, session).turns()) == 2
