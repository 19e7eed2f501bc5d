"""A gateway that only opens, counts, seals and deletes sessions, and remembers what it was told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

ADMIN_KEY = "admin"


@dataclass
class FakeGateway:
    """`failing` holds the actions ("open", "get", "seal", "delete", or one session's, "delete ID") that answer 500."""

    url: str = ""
    opened: dict[str, dict[str, Any]] = field(default_factory=dict)
    sealed: dict[str, dict[str, Any]] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    failing: set[str] = field(default_factory=set)
    num_turns: int = 0  # of every session

    async def open(self, request: web.Request) -> web.Response:
        self._admit(request, "open")
        id = f"steno_{len(self.opened)}"
        self.opened[id] = await request.json()
        opened = {"id": id, "api_key": f"key-{id}", "base_url": f"{self.url}/s/{id}"}
        return web.json_response(opened, status=201)

    async def seal(self, request: web.Request) -> web.Response:
        self._admit(request, "seal")
        self.sealed[request.match_info["id"]] = await request.json()
        return web.json_response({})

    async def get(self, request: web.Request) -> web.Response:
        self._admit(request, "get")
        return web.json_response({"num_turns": self.num_turns})

    async def delete(self, request: web.Request) -> web.Response:
        self._admit(request, "delete")
        self.deleted.append(request.match_info["id"])
        return web.json_response({"released": [request.match_info["id"]]})

    async def has_opened(self, num_sessions: int, timeout_s: float = 10.0) -> None:
        for _ in range(int(timeout_s / 0.01)):
            if len(self.opened) >= num_sessions:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{len(self.opened)} sessions opened, not {num_sessions}")

    def _admit(self, request: web.Request, action: str) -> None:
        if request.headers.get("authorization") != f"Bearer {ADMIN_KEY}":
            raise web.HTTPUnauthorized
        if {action, f"{action} {request.match_info.get('id')}"} & self.failing:
            raise web.HTTPInternalServerError(text=f"no {action} today")


@asynccontextmanager
async def fake_gateway() -> AsyncIterator[FakeGateway]:
    gateway = FakeGateway()
    routes = [
        web.post("/sessions", gateway.open),
        web.get("/sessions/{id}", gateway.get),
        web.post("/sessions/{id}/seal", gateway.seal),
        web.delete("/sessions/{id}", gateway.delete),
    ]
    async with listening(*routes) as gateway.url:
        yield gateway


@asynccontextmanager
async def listening(*routes: web.RouteDef) -> AsyncIterator[str]:
    """Serve `routes` on a free port; the address."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
