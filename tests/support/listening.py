"""A real gateway on the test's own loop, over an engine and a store of the test's choice."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from stenograph.config import Config, ModelConfig
from stenograph.dialects import chat
from stenograph.engines.base import Engine
from stenograph.engines.scripted import Line, ScriptedEngine
from stenograph.gateway.calls import Call
from stenograph.gateway.server import Gateway
from stenograph.gateway.turns import Names, as_proposed
from stenograph.rendering import Rendering, load_rendering
from stenograph.traces.memory import MemoryTraceStore
from stenograph.traces.store import TraceStore
from stenograph.types import Reply

CHAT = "/v1/chat/completions"


def rendering() -> Rendering:
    return load_rendering(ModelConfig())


def say(rendering: Rendering, text: str, **options: Any) -> Line:
    """A line of a script that says `text`."""
    return Line(rendering.encode_reply(Reply(text)), **options)


def chat_body(text: str, **fields: Any) -> bytes:
    return json.dumps({"model": "any", "messages": [{"role": "user", "content": text}], **fields}).encode()


def new_call(text: str, **fields: Any) -> Call:
    """A call as the gateway makes one of a chat request."""
    request = chat.parse_request(chat_body(text, **fields))
    return Call(request, {}, "key", max_tokens=100)


async def becomes(condition: Callable[[], bool]) -> None:
    """Wait for what nothing tells of."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@asynccontextmanager
async def tidy() -> AsyncIterator[None]:
    """When it is left, no task may be left over, and nothing may have gone wrong that nobody was told of."""
    loop = asyncio.get_running_loop()
    unheard: list[Mapping[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)  # connections say that they are closed a moment later
    gc.collect()
    assert asyncio.all_tasks() == before
    assert unheard == []


@asynccontextmanager
async def listening(
    engine: Engine | Sequence[Line],
    store: TraceStore | None = None,
    select: Mapping[str, Any] | None = None,
    family: Rendering | None = None,
    names: Names = as_proposed,
    **settings: Any,
) -> AsyncIterator[Client]:
    """A gateway and a client of it; `settings` are those of [gateway], `select` is the section of that name."""
    served = ScriptedEngine(list(engine)) if isinstance(engine, Sequence) else engine
    engine_settings = {"kind": "scripted", "script": "-"}
    config = Config.model_validate(
        {"engine": engine_settings, "gateway": {"port": 0, **settings}, "select": select or {}}
    )
    gateway = Gateway(config, served, family or rendering(), store or MemoryTraceStore(), "admin", "model", names)
    async with tidy(), client_of(gateway) as client:
        yield client


@asynccontextmanager
async def client_of(gateway: Gateway) -> AsyncIterator[Client]:
    """Start `gateway`; it and its engine end with this."""
    await gateway.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield Client(gateway, http)
    finally:
        await gateway.stop()
        await gateway.engine.aclose()


class Client:
    """Requests with the admin's key, or in a session."""

    def __init__(self, gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self._http = http

    @property
    def url(self) -> str:
        return self.gateway.url

    async def open(self, **body: Any) -> Session:
        opened = await self.json("POST", "/sessions", body)
        return Session(self, opened["id"], opened["api_key"])

    async def json(self, method: str, path: str, body: Any = None) -> Any:
        return json.loads((await self.send(method, path, None if body is None else json.dumps(body).encode()))[2])

    async def send(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of whatever is answered."""
        headers = {"authorization": f"Bearer {self.gateway.admin_key}", **(headers or {})}
        async with self._http.request(method, self.url + path, data=body and BytesIO(body), headers=headers) as answer:
            return answer.status, answer.headers, await answer.read()

    async def hear(
        self, method: str, path: str, body: bytes | None, headers: Sequence[tuple[str, str]]
    ) -> tuple[int, bytes, bool]:
        """Status, what arrived of the body, and whether that is all of it. No header is added, and no key."""
        async with self._http.request(method, self.url + path, data=body, headers=headers) as answer:
            return await arrived(answer)


@dataclass(frozen=True, slots=True)
class Session:
    """One session of a gateway, as its agent and as its owner see it."""

    client: Client
    id: str
    api_key: str

    async def ask(self, body: bytes, path: str = CHAT) -> tuple[int, Mapping[str, str], bytes]:
        headers = {"authorization": f"Bearer {self.api_key}"}
        return await self.client.send("POST", f"/s/{self.id}{path}", body, headers)

    async def connect(self, body: bytes, path: str = CHAT) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request over a socket of its own, with nothing between it and the bytes."""
        url = urlsplit(self.client.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        head = f"POST /s/{self.id}{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.api_key}\r\n"
        head += "connection: close\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        return reader, writer

    async def raw(self, body: bytes, path: str = CHAT) -> bytes:
        """Every byte of the answer, up to the end of the connection."""
        reader, writer = await self.connect(body, path)
        try:
            async with asyncio.timeout(20):
                return await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()

    async def ledger(self) -> Any:
        ledger = await self.client.json("GET", f"/sessions/{self.id}/ledger")
        ended = ledger["trained"] + sum(ledger["masked"].values()) + sum(ledger["dropped"].values())
        assert ended + ledger["in_flight"] == ledger["sampled"]
        return ledger

    async def turns(self) -> list[Any]:
        return (await self.client.json("GET", f"/sessions/{self.id}/tree"))["turns"]

    async def until(self, *states: str) -> None:
        """Wait until the turns are in these states."""
        async with asyncio.timeout(20):
            while [turn["state"] for turn in await self.turns()] != list(states):  # noqa: ASYNC110 (another's state)
                await asyncio.sleep(0.01)


async def arrived(answer: aiohttp.ClientResponse) -> tuple[int, bytes, bool]:
    """Status, what arrived of the body, and whether that is all of it."""
    body = b""
    try:
        async for piece in answer.content.iter_any():
            body += piece
    except aiohttp.ClientPayloadError:
        return answer.status, body, False
    return answer.status, body, True
