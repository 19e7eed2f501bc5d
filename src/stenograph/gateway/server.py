"""The HTTP server: every request is authorised, then answered by one handler; errors keep the protocol's shape."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass

import orjson
from aiohttp import web

from stenograph.config import Config
from stenograph.dialects import chat
from stenograph.engines.base import Engine
from stenograph.errors import ConfigError, RequestError, StenographError
from stenograph.gateway import paths
from stenograph.gateway.admin import SessionRoutes
from stenograph.gateway.chat import ChatRoute
from stenograph.gateway.sessions import PREFIX, Sessions
from stenograph.gateway.turns import Turns
from stenograph.rendering.base import Rendering
from stenograph.traces.store import TraceStore

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Gateway:
    """A gateway bound to its engine, rendering and store. Start and stop it on one event loop."""

    config: Config
    engine: Engine
    rendering: Rendering
    store: TraceStore
    admin_key: str
    model_name: str

    def __post_init__(self) -> None:
        settings = self.config.gateway
        self.sessions = Sessions(
            self.store,
            admin_key=self.admin_key,
            require_keys=settings.require_keys,
            ttl_s=settings.session_ttl_s,
        )
        turns = Turns(self.engine, self.rendering, self.store, self.config.sampling)
        self._chat = ChatRoute(turns)
        self._admin = SessionRoutes(self.sessions, settings.seal_timeout_s)
        self._runner: web.AppRunner | None = None
        self._expiry: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self) -> None:
        """Listen; `self.url` is the address then. Raises ConfigError where the address cannot be had."""
        settings = self.config.gateway
        app = web.Application(client_max_size=settings.max_body_bytes)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, settings.host, settings.port)
        try:
            await site.start()
        except OSError as e:
            await self._runner.cleanup()
            told = f"gateway.port: cannot listen on {settings.host}:{settings.port}: {e.strerror or e}"
            raise ConfigError(f"{told}; choose another port, 0 takes a free one") from e
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._admin.public_url = settings.public_url or self.url
        self._expiry = asyncio.create_task(self._expire())

    async def stop(self) -> None:
        """Abort what is in flight and close; safe to call twice."""
        if self._expiry is not None:
            self._expiry.cancel()
            with suppress(asyncio.CancelledError):
                await self._expiry
            self._expiry = None
        await self.sessions.aclose()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(30.0, self.config.gateway.session_ttl_s))
            await self.sessions.expire(self.config.gateway.seal_timeout_s)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        target = paths.read(request.raw_path)
        is_admin_address = target.session is None and target.path.split("/")[1] == "sessions"
        try:
            if is_admin_address:
                return await self._admin.handle(request, target.path, _key(request))
            return await self._route(request, target)
        except (web.RequestPayloadError, ConnectionError) as e:
            return self._error(RequestError(f"the body cannot be read: {e}"), is_admin_address)
        except (StenographError, web.HTTPException) as e:
            if isinstance(e, web.HTTPException) and e.status != 413:
                raise
            return self._error(e, is_admin_address)
        except Exception as e:
            log.exception("bug while answering %s %s", request.method, target.path)
            return self._error(e, is_admin_address)

    async def _route(self, request: web.Request, target: paths.Target) -> web.StreamResponse:
        method, path = request.method, target.path
        if path == "/healthz" and target.session is None:
            await self.engine.health()
            return _json({"status": "ok"})
        if method == "HEAD" and path in ("/", "/api/hello"):
            return web.Response()
        session = self.sessions.authorise(_key(request), target.session)
        if paths.is_generation(method, path):
            asked = chat.parse_request(await request.read())
            hint = _hint(request) or asked.session
            if hint is not None and session is self.sessions.untraced:  # any other key or path has chosen already
                session = self.sessions.find(hint)
            return await self._chat.answer(request, session, asked)
        if path == "/v1/models" and method == "GET":
            model = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "stenograph"}
            return _json({"object": "list", "data": [model]})
        told = f"{method} {path} is not served: this engine has no server of its own to pass it to"
        if not path.startswith(self.config.gateway.passthrough):
            told = f"{method} {path} is not an address of this gateway"
        raise RequestError(told, status=404, retry=False)

    def _error(self, e: Exception, is_admin_address: bool) -> web.Response:
        if isinstance(e, web.HTTPException):
            limit = self.config.gateway.max_body_bytes
            e = RequestError(
                f"the body is larger than {limit} bytes; raise gateway.max_body_bytes", status=413, retry=False
            )
        status, headers, body = chat.error(e)
        if is_admin_address:
            detail = orjson.loads(body)["error"]
            body = orjson.dumps({"error": {"type": detail["type"], "message": detail["message"]}})
        return web.Response(status=status, headers=headers, body=body)


def new_admin_key() -> str:
    """From STENO_ADMIN_KEY, or random."""
    return os.environ.get("STENO_ADMIN_KEY") or PREFIX + "admin_" + secrets.token_hex(16)


def _key(request: web.Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return request.headers.get("x-api-key")


def _hint(request: web.Request) -> str | None:
    """`x-session-id` names a session of ours only in our own form; clients put ids of their own there."""
    hint = request.headers.get("x-session-id", "")
    return hint if hint.startswith(PREFIX) else None


def _json(payload: object) -> web.Response:
    return web.Response(body=orjson.dumps(payload), content_type="application/json")
