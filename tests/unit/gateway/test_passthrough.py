"""What is auxiliary goes to the engine's server and back byte for byte, less keys and session ids of ours."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from multidict import MultiMapping
from pydantic import SecretStr
from yarl import URL

from stenograph.errors import EngineUnavailable
from stenograph.gateway import paths
from stenograph.gateway.passthrough import Passthrough, without_session

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """A request as the engine's server had it."""

    method: str
    raw_path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Between:
    """A client's side of the gateway, and what reached the engine."""

    url: str
    seen: list[Seen] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)  # the engine saw its client go away
    refused: list[EngineUnavailable] = field(default_factory=list)

    async def send(
        self, path: str = "/v1/embeddings", body: bytes = b"", method: str = "POST", **headers: str
    ) -> tuple[int, MultiMapping[str], bytes]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with aiohttp.ClientSession(auto_decompress=False) as http:
            async with http.request(
                method, URL(self.url + path, encoded=True), data=body or None, headers=sent, allow_redirects=False
            ) as response:
                return response.status, response.headers, await response.read()

    async def raw(self, head: str, *, until: bytes | None = None) -> bytes:
        """What comes over a socket of its own, up to the end of the connection or of `until`."""
        url = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        try:
            async with asyncio.timeout(10):
                writer.write(head.encode())
                return await (reader.read() if until is None else reader.readuntil(until))
        finally:
            writer.close()
            await writer.wait_closed()


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def between(engine: Handler, host: str = "127.0.0.1", api_key: SecretStr | None = None) -> AsyncIterator[Between]:
    """A client, the pass-through, and an engine that answers by `engine`."""
    state = Between("")

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        state.seen.append(Seen(request.method, request.raw_path, headers, body))
        try:
            return await engine(request)
        except asyncio.CancelledError:
            state.left.set()
            raise

    async with serving(answer) as engine_url:
        passthrough = Passthrough(engine_url.replace("127.0.0.1", host), api_key)

        async def forward(request: web.Request) -> web.StreamResponse:
            try:
                return await passthrough.forward(request, paths.read(request.raw_path).path, await request.read())
            except EngineUnavailable as e:
                state.refused.append(e)
                return web.Response(status=e.status)

        async with serving(forward) as state.url:
            try:
                yield state
            finally:
                await passthrough.aclose()
    assert passthrough._open == set()
    for _ in range(50):  # connections say that they are closed a moment later
        if len(asyncio.all_tasks()) == 1:
            break
        await asyncio.sleep(0.02)
    assert len(asyncio.all_tasks()) == 1


async def ok(request: web.Request) -> web.StreamResponse:
    return web.json_response({"ok": True})


# There


async def test_a_request_goes_along_byte_for_byte() -> None:
    body = b'{ "input" : [1.0, 1e2, 9007199254740993], "input":"\\u00e9" }'
    async with between(ok) as state:
        status, _, answer = await state.send(
            "/s/steno_1/v1/embeddings?a=%2F&b=c+d&&e", body, content_type="application/json; x=1", x_custom="kept"
        )
        (seen,) = state.seen
    assert (status, answer) == (200, b'{"ok": true}')
    assert (seen.method, seen.raw_path, seen.body) == ("POST", "/v1/embeddings?a=%2F&b=c+d&&e", body)
    assert (seen.headers["content-type"], seen.headers["x-custom"]) == ("application/json; x=1", "kept")


async def test_what_is_no_json_goes_along_too() -> None:
    body = bytes(range(256)) * 1000
    async with between(ok) as state:
        await state.send("/v1/audio", body, method="PUT", content_type="multipart/form-data; boundary=x")
        await state.send("/v1/models/x", method="DELETE")
        assert [(s.method, s.body) for s in state.seen] == [("PUT", body), ("DELETE", b"")]


async def test_keys_hosts_and_hops_stay_here() -> None:
    async with between(ok) as state:
        await state.send(
            body=b"{}",
            authorization="Bearer k",
            x_api_key="k",
            api_key="k",
            x_goog_api_key="k",
            cookie="a=b",
            proxy_authorization="Basic k",
            x_session_id="steno_1",
            connection="keep-alive, x-hop",
            x_hop="1",
            keep_alive="timeout=5",
            te="trailers",
            upgrade="h2c",
            user_agent="agent/1",
            accept="text/plain",
            accept_encoding="identity",
        )
        headers = state.seen[0].headers
    keys = {"authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie", "proxy-authorization", "x-session-id"}
    assert not (keys | {"x-hop", "keep-alive", "te", "upgrade"}) & set(headers)
    assert (headers["user-agent"], headers["accept"], headers["accept-encoding"]) == (
        "agent/1",
        "text/plain",
        "identity",
    )


async def test_the_engines_own_key_takes_the_place_of_the_clients() -> None:
    async with between(ok, api_key=SecretStr("the-engine's")) as state:
        await state.send(body=b"{}", authorization="Bearer k", x_api_key="k")
        await state.send(method="GET")
        assert [s.headers["authorization"] for s in state.seen] == ["Bearer the-engine's"] * 2
        assert "x-api-key" not in state.seen[0].headers


async def test_nothing_is_added_to_a_request() -> None:
    async with between(ok) as state:
        await state.raw("GET /v1/models HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n")
        assert set(state.seen[0].headers) == {"host"}
        assert state.seen[0].headers["host"] != "gateway"


async def test_a_clients_own_session_id_stays() -> None:
    body = b'{"session_id": "theirs"}'
    async with between(ok) as state:
        await state.send(body=body, x_session_id="theirs")
        assert (state.seen[0].body, state.seen[0].headers["x-session-id"]) == (body, "theirs")


async def test_a_session_of_ours_is_cut_out_and_the_length_is_new() -> None:
    async with between(ok) as state:
        await state.send(body=b'{"a": 1.0, "session_id": "steno_1", "a": 2}')
        assert state.seen[0].body == b'{"a": 1.0,  "a": 2}'
        assert state.seen[0].headers["content-length"] == "19"


async def test_messages_have_a_version() -> None:
    async with between(ok) as state:
        await state.send("/v1/messages/batches?beta=true", b"{}")
        await state.send("/v1/messages/batches", b"{}", anthropic_version="2024-01-01")
        await state.send("/v1/messagesx", b"{}")
        assert [s.headers.get("anthropic-version") for s in state.seen] == ["2023-06-01", "2024-01-01", None]


async def test_a_body_that_was_decoded_is_not_called_encoded() -> None:
    async with between(ok) as state:
        await state.send(body=gzip.compress(b'{"input": "x"}'), content_encoding="gzip")
        await state.send(body=b"as it is", content_encoding="x-unknown")
        assert [(s.body, s.headers.get("content-encoding")) for s in state.seen] == [
            (b'{"input": "x"}', None),
            (b"as it is", "x-unknown"),
        ]


@pytest.mark.parametrize(
    ("raw", "reached"),
    [
        ("/v1/%2e%2e/pause", "/pause"),
        ("//v1//x", "/v1/x"),
        ("/v1/%2563ompletions", "/v1/%2563ompletions"),  # decoded once here, once there
        ("/v1/a%3Fb%23c?d", "/v1/a%3Fb%23c?d"),
        ("/v1/a%20b+c", "/v1/a%20b+c"),
        ("/v1/%C3%A9", "/v1/%C3%A9"),
        ("/v1/a%09b", "/v1/a%09b"),
    ],
)
async def test_the_path_that_was_judged_is_the_path_that_is_asked(raw: str, reached: str) -> None:
    async with between(ok) as state:
        await state.raw(f"GET {raw} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert [s.raw_path for s in state.seen] == [reached]


# The cut


SPACE = st.text(alphabet=" \t\n\r", max_size=3)
PLAIN = ["1.0", "1E+2", "-0", "12345678901234567890123", "null", "true", '"x"', '"\\u00e9"', '"é"', '"\\ud83d"', "[ ]"]
ODD = ['{"session_id": "steno_x", "session_id": 1}', '[{"session_id": "steno_x"}]', '"session_id"', '"},{"', '"a,b"']
VALUES = st.sampled_from(PLAIN + ODD)
NAMES = st.sampled_from(['"a"', '"b"', '"sessionid"', '""', '"session\\\\u005fid"', '"\\""', '"steno_"'])
OURS = st.tuples(
    st.sampled_from(['"session_id"', '"session\\u005fid"', '"\\u0073ession_id"']),
    st.sampled_from(['"steno_1"', '"\\u0073teno_1"', '"steno_"', '"steno_é\\n"']),
)
THEIRS = st.tuples(
    st.one_of(NAMES, st.just('"session_id"')),
    VALUES,
)


@st.composite
def objects(draw: st.DrawFn) -> tuple[str, list[tuple[str, str]], list[str]]:
    """An object's text, its members that are not to be cut, and the text of each."""
    members = draw(st.lists(st.one_of(st.tuples(st.just(True), OURS), st.tuples(st.just(False), THEIRS)), max_size=6))
    written = [f"{name}{draw(SPACE)}:{draw(SPACE)}{value}" for _, (name, value) in members]
    padded = [draw(SPACE) + text + draw(SPACE) for text in written]
    text = draw(SPACE) + "{" + (",".join(padded) or draw(SPACE)) + "}" + draw(SPACE)
    kept = [member for ours, member in members if not ours]
    return text, kept, [text for text, (ours, _) in zip(written, members, strict=True) if not ours]


@given(objects())
def test_the_cut_takes_the_member_and_nothing_else(made: tuple[str, list[tuple[str, str]], list[str]]) -> None:
    text, kept, written = made
    result = without_session(text.encode()).decode()
    pairs = json.loads(result, object_pairs_hook=lambda pairs: pairs)
    assert pairs == json.loads("{" + ",".join(map(":".join, kept)) + "}", object_pairs_hook=lambda pairs: pairs)
    rest = result
    for member in written:  # in order, each as it was written
        before, found, rest = rest.partition(member)
        assert found
        assert not before.strip(" \t\n\r{,")
    assert not rest.strip(" \t\n\r{}")
    if len(json.loads(text, object_pairs_hook=lambda pairs: pairs)) == len(pairs):
        assert result == text


@given(st.one_of(st.binary(max_size=40), st.text(alphabet='{}[]":,\\u0session_idteno1 ', max_size=60).map(str.encode)))
def test_what_is_no_object_is_left_alone(body: bytes) -> None:
    try:
        read = json.loads(body)
    except ValueError:
        read = None
    if not isinstance(read, dict) or "session_id" not in read:
        assert without_session(body) == body


@pytest.mark.parametrize(
    "body",
    [
        b'[{"session_id": "steno_1"}]',
        b'"session_id"',
        b'{"session_id": "steno_1"',
        b'{"session_id": "steno_1"} x',
        b'{"session_id": "steno_1",}',
        b'{"session_id": "steno_1" "a": 1}',
        b'{session_id: "session_id"}',
        b'{"session_id": ["steno_1"]}',
        b'{"session_id": null}',
        b'{"session_id": "Steno_1"}',
        b'\xff{"session_id": "steno_1"}',
        b'{"session_id": "steno_1", "deep": ' + b"[" * 100_000,
        b"",
    ],
    ids=lambda body: body[:30].decode(errors="replace"),
)
def test_bodies_that_stay(body: bytes) -> None:
    assert without_session(body) == body


def test_a_long_number_is_no_hindrance() -> None:
    assert without_session(b'{"session_id":"steno_1","n":' + b"9" * 10_000 + b"}") == b'{"n":' + b"9" * 10_000 + b"}"


# And back


@pytest.mark.parametrize("status", [200, 201, 301, 400, 404, 418, 429, 500, 503])
async def test_an_answer_comes_back_as_it_is(status: int) -> None:
    told = b'{"error":{"message":"as the engine said",\n"code":1.0}}'

    async def engine(request: web.Request) -> web.StreamResponse:
        headers = [("set-cookie", "a=1"), ("set-cookie", "b=2"), ("x-odd", "1"), ("location", "/else")]
        headers += [("retry-after", "7"), ("connection", "x-hop"), ("x-hop", "1"), ("content-type", "x/y; z=1")]
        response = web.Response(status=status, body=told)
        response.headers.extend(headers)
        response.headers.popall("content-type")
        response.headers["content-type"] = "x/y; z=1"
        response.headers["server"] = "engine/1"
        return response

    async with between(engine) as state:
        answered, headers, body = await state.send(body=b"{}")
    assert (answered, body) == (status, told)
    found = [(name.lower(), value) for name, value in headers.items()]
    for header in [("set-cookie", "a=1"), ("set-cookie", "b=2"), ("x-odd", "1"), ("location", "/else")]:
        assert header in found
    assert [value for name, value in found if name in ("content-type", "server")] == ["x/y; z=1", "engine/1"]
    assert ("content-length", str(len(told))) in found
    assert "x-hop" not in dict(found)


async def test_an_encoded_answer_stays_encoded() -> None:
    body = gzip.compress(b"text" * 100)

    async def engine(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, headers={"content-encoding": "gzip"})

    async with between(engine) as state:
        _, headers, answer = await state.send(accept_encoding="gzip")
        assert (answer, headers["content-encoding"]) == (body, "gzip")


async def test_an_answer_without_a_body_has_none() -> None:
    async def engine(request: web.Request) -> web.StreamResponse:
        return web.Response(status=204) if request.method == "POST" else web.Response(body=b"x" * 1000)

    async with between(engine) as state:
        assert (await state.send())[0::2] == (204, b"")
        status, headers, body = await state.send(method="HEAD")
        assert (status, headers["content-length"], body) == (200, "1000", b"")


async def test_an_answer_is_passed_on_as_it_comes() -> None:
    go_on = asyncio.Event()

    async def engine(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await go_on.wait()
        await response.write(b"data: 2\n\n")
        return response

    async with between(engine) as state, aiohttp.ClientSession() as http:
        async with http.get(state.url + "/v1/x") as response:
            assert await response.content.readany() == b"data: 1\n\n"
            go_on.set()
            assert await response.content.read() == b"data: 2\n\n"


async def test_one_clients_cookie_is_not_anothers() -> None:
    async def engine(request: web.Request) -> web.StreamResponse:
        return web.Response(headers={"set-cookie": "who=first"})

    async with between(engine, "localhost") as state:  # an address in digits has no cookies
        await state.send()
        await state.send()
        assert "cookie" not in state.seen[1].headers


# Ends that are not clean


async def broken(request: web.Request, *, reset: bool, length: int | None) -> web.StreamResponse:
    """Half an answer, and then no connection."""
    response = web.StreamResponse(headers={"content-length": str(length)} if length else None)
    await response.prepare(request)
    await response.write(b"half")
    await asyncio.sleep(0.05)
    transport = request.transport
    assert transport is not None
    if reset:
        linger = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    transport.abort()
    return response


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("length", [None, 8], ids=["chunked", "sized"])
async def test_a_cut_is_never_a_clean_end(reset: bool, length: int | None) -> None:
    async with between(lambda request: broken(request, reset=reset, length=length)) as state:
        answer = await state.raw("GET /v1/x HTTP/1.1\r\nhost: x\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert body == (b"half" if length else b"4\r\nhalf\r\n")  # and no "0\r\n\r\n"
        with pytest.raises(aiohttp.ClientPayloadError):
            await state.send(method="GET")


async def test_a_client_that_leaves_takes_the_request_along() -> None:
    async def engine(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        await asyncio.Event().wait()  # and says nothing more
        return response

    async with between(engine) as state:
        await state.raw("GET /v1/x HTTP/1.1\r\nhost: x\r\n\r\n", until=b"first")
        await asyncio.wait_for(state.left.wait(), 10)


async def test_a_client_that_leaves_before_the_answer_takes_the_request_along() -> None:
    async def engine(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        return web.Response()

    async with between(engine) as state, aiohttp.ClientSession() as http:
        asked = asyncio.create_task(http.get(state.url + "/v1/x"))
        while not state.seen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.wait_for(state.left.wait(), 10)


async def test_an_engine_that_hangs_up_without_an_answer_is_unavailable() -> None:
    async def engine(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with between(engine) as state:
        assert (await state.send())[0] == 503
        assert "cannot be reached" in str(state.refused[0])


async def test_an_engine_that_is_not_there_is_unavailable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, and never listening
        passthrough = Passthrough(f"http://127.0.0.1:{unused.getsockname()[1]}")

        async def forward(request: web.Request) -> web.StreamResponse:
            with pytest.raises(EngineUnavailable, match="cannot be reached"):
                await passthrough.forward(request, "/v1/x", b"")
            return web.Response(status=204)

        async with serving(forward) as url, aiohttp.ClientSession() as http:
            async with http.get(url) as response:
                assert response.status == 204
        await passthrough.aclose()


async def test_closing_ends_what_is_under_way() -> None:
    async def engine(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        await asyncio.Event().wait()
        return response

    async with serving(engine) as engine_url:
        passthrough = Passthrough(engine_url)

        async def forward(request: web.Request) -> web.StreamResponse:
            return await passthrough.forward(request, "/v1/x", b"")

        async with serving(forward) as url, aiohttp.ClientSession() as http, http.get(url) as response:
            assert await response.content.readany() == b"first"
            await passthrough.aclose()
            with pytest.raises(aiohttp.ClientPayloadError):
                async with asyncio.timeout(10):
                    await response.content.read()


# What a session's key may not reach


@pytest.mark.parametrize(
    ("path", "control"),
    [
        ("/v1/load_lora_adapter", True),
        ("/v1/unload_lora_adapter", True),
        ("/load_lora_adapter", True),
        ("/pause", True),
        ("/sleep", True),
        ("/update_weights_from_disk", True),
        ("/flush_cache", True),
        ("/collective_rpc", True),
        ("/distserve/engine_info", True),
        ("/v1/models", False),
        ("/v1/embeddings", False),
        ("/tokenize", False),
        ("/v1", False),
        ("/", False),
        ("/v1pause", False),
    ],
)
def test_engine_controls(path: str, control: bool) -> None:
    assert paths.is_engine_control(path) == control


@pytest.mark.parametrize(
    ("request_line", "unrecorded"),
    [
        ("POST /v1/completions", True),
        ("post /v1/completions", True),
        ("POST /v1/completions_qos", True),
        ("POST /v1/chat/completions/batch", True),
        ("POST /v1/chat/interactive", True),
        ("POST /v1/messages/batches", True),
        ("POST /v1/batches", True),
        ("POST /v1/responses/compact", True),
        ("POST /v1/audio/transcriptions", True),
        ("POST /v1/audio/speech", True),
        ("POST /v1/decisions", True),
        ("POST /v1/images/generations", True),
        ("POST /generate", True),
        ("POST /invocations", True),
        ("POST /inference/v1/generate", True),
        ("POST /v1/chat/completions", False),
        ("POST /v1/messages", False),
        ("POST /v1/responses", False),
        ("POST /v1/messages/count_tokens", False),
        ("POST /v1/responses/resp_1/cancel", False),
        ("POST /v1/chat/completions/render", False),
        ("POST /v1/completions/render", False),
        ("GET /v1/responses/resp_1", False),
        ("GET /v1/completions", False),
        ("POST /v1/embeddings", False),
        ("POST /v1/rerank", False),
        ("POST /v1/score", False),
        ("POST /tokenize", False),
        ("POST /detokenize", False),
        ("POST /", False),
    ],
)
def test_generation_that_no_session_would_hear_of(request_line: str, unrecorded: bool) -> None:
    assert paths.is_unrecorded_generation(*request_line.split(" ")) == unrecorded
