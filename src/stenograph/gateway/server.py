"""The HTTP server: every request is authorised, then answered by one handler; errors keep the protocol's shape."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from stenograph.config import Config
from stenograph.dialects import chat, messages, responses
from stenograph.dialects.base import SESSION_PREFIX, Dialect, own_session
from stenograph.dialects.seen import Seen
from stenograph.engines.base import Engine
from stenograph.errors import ConfigError, OwnedElsewhere, RequestError, StenographError
from stenograph.gateway import bodies, paths
from stenograph.gateway.admin import SessionRoutes
from stenograph.gateway.answers import Answers
from stenograph.gateway.forwarding import FORWARDED, Arrivals, Forwarder, Gone
from stenograph.gateway.passthrough import Passthrough
from stenograph.gateway.sessions import ADMIN_KEY_REMEDY, Session, Sessions
from stenograph.gateway.turns import Names, Turns, as_proposed
from stenograph.rendering.base import Rendering
from stenograph.traces.store import TraceStore

log = logging.getLogger(__name__)


def _unquoted(record: logging.LogRecord) -> bool:
    """Requests that are no HTTP are told of without the bytes that aiohttp quotes: there are keys among them.

    Bodies that cannot be decoded are not told of at all: whoever sent one was.
    """
    e = record.exc_info[1] if record.exc_info else None
    if isinstance(e, web.RequestPayloadError):
        return False
    if isinstance(e, HttpProcessingError):
        record.msg, record.exc_info = f"{record.msg}: {type(e).__name__}", None
    return True


_http_log = log.getChild("http")
_http_log.addFilter(_unquoted)


@dataclass(eq=False)
class Gateway:
    """A gateway bound to its engine, rendering and store. Start and stop it on one event loop.

    `address` is where other processes send what they get for sessions that `store` has; empty: nowhere.
    """

    config: Config
    engine: Engine
    rendering: Rendering
    store: TraceStore
    admin_key: str
    model_name: str
    names: Names = as_proposed
    address: str = ""

    def __post_init__(self) -> None:
        settings = self.config.gateway
        self.sessions = Sessions(
            self.store,
            admin_key=self.admin_key,
            require_keys=settings.require_keys,
            ttl_s=settings.session_ttl_s,
            idle_s=self.config.store.idle_s,
        )
        self._turns = Turns(self.engine, self.rendering, self.store, self.config, self.names)
        self._answers = Answers(self._turns, self.store, self.config)
        key = self.config.engine.api_key
        self._passthrough = Passthrough(self.engine.server, key) if self.engine.server is not None else None
        self._admin = SessionRoutes(self.sessions, self.config.select, settings.seal_timeout_s)
        self._forwarder = Forwarder()
        self._arrivals = Arrivals(self.address, self._handle) if self.address else None
        self._runner: web.AppRunner | None = None
        self._expiry: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """Listen, at `sockets` where they are given; `self.url` is the address then.

        Raises ConfigError where the address cannot be had.
        """
        settings = self.config.gateway
        app = web.Application(client_max_size=settings.max_body_bytes)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, logger=_http_log, access_log=None, shutdown_timeout=1.0, handler_cancellation=True
        )
        await self._runner.setup()
        sites = [web.SockSite(self._runner, one, backlog=MAX_WAITING) for one in sockets] or [
            web.TCPSite(self._runner, settings.host, settings.port, backlog=MAX_WAITING)
        ]
        try:
            if self._arrivals is not None:
                await self._arrivals.start(settings.max_body_bytes, MAX_WAITING)
            for site in sites:
                await site.start()
        except OSError as e:
            await self.stop()
            raise cannot_listen(settings.host, settings.port, e) from e
        address: tuple[str, int] = self._runner.addresses[0][:2]
        host, port = _REACHED_AT.get(address[0], address[0]), address[1]
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
        if self._arrivals is not None:
            await self._arrivals.stop()
        await self._forwarder.aclose()
        if self._passthrough is not None:
            await self._passthrough.aclose()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(30.0, self.config.gateway.session_ttl_s))
            await self.sessions.expire(self.config.gateway.seal_timeout_s)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        target = paths.read(request.rel_url.raw_path)  # less the host that a proxy's client names
        dialect = _dialect(paths.meant(target.path) or target.path, request)
        is_admin_address = target.session is None and target.path.split("/")[1] == "sessions"
        try:
            return await self._here_or_there(request, target, dialect, is_admin_address)
        except Exception as e:
            client_left = request.transport is None or request.transport.is_closing()
            if not isinstance(e, StenographError) and not client_left:
                log.exception("bug while answering %s %s", request.method, target.path)
            response = _error(e, dialect, is_admin_address)
            if isinstance(e.__cause__, web.RequestPayloadError):
                response.force_close()  # aiohttp closes such a connection: no client may send its next request there
            return response

    async def _here_or_there(
        self, request: web.Request, target: paths.Target, dialect: Dialect, is_admin_address: bool
    ) -> web.StreamResponse:
        """Answered by the process that has the session. Whose process is gone is this one's from then on."""
        wanted = self.sessions.untraced.id if is_admin_address else target.session  # no session's key opens the former
        key = self.sessions.choose(self._keys(request), wanted)
        for _ in range(_MOST_TRIES):
            try:
                if is_admin_address:
                    return await self._admin.handle(request, target.path, key)
                return await self._route(request, target, dialect, key)
            except OwnedElsewhere as e:
                await self.sessions.lose(e.session)
                if FORWARDED in request or not e.address:
                    break
                with suppress(Gone):
                    return await self._forwarder.forward(
                        request, e.address, dialect, is_admin=self.sessions.is_admin(key)
                    )
            await asyncio.sleep(_RETRY_S)  # it is gone a moment after it stopped to answer, or it starts to
        told = "another process has this session, and does not answer; try again"
        raise RequestError(told, status=503, headers={"retry-after": "1"})

    async def _route(
        self, request: web.Request, target: paths.Target, dialect: Dialect, key: str | None
    ) -> web.StreamResponse:
        method, path = request.method, target.path
        if path == "/healthz" and target.session is None:
            await self.engine.health()
            return _json({"status": "ok"})
        if method == "HEAD" and path in ("/", "/api/hello"):
            return web.Response()
        session = self.sessions.authorise(key, target.session)
        if paths.is_generation(method, path):
            body = await bodies.read(request)
            asked = dialect.parse_request(body, self._seen(request, session, body))
            session = self._named(request, session, asked.session)
            return await self._answers.answer(request, session, asked)
        if method == "POST" and path == paths.COUNT_TOKENS:
            body = await bodies.read(request)
            asked = messages.parse_count(body, self._seen(request, session, body))
            session = self._named(request, session, asked.session)
            return _json(messages.count(await self._turns.count(session, asked.conversation)))
        if method == "GET" and path == "/v1/models":
            return _json({"object": "list", "data": [_model(self.model_name)], "has_more": False})
        if method == "GET" and path.startswith("/v1/models/"):  # whatever it is called: that is what answers
            return _json(_model(path.removeprefix("/v1/models/")))
        self._check_auxiliary(method, path, session, key)
        if self._passthrough is None:
            told = f"{method} {path} is not served: this engine has no server of its own to pass it to"
            raise RequestError(told, status=404, retry=False)
        return await self._passthrough.forward(request, path, await bodies.read(request))

    def _keys(self, request: web.Request) -> list[str]:
        """The keys that a request carries: clients send one of an earlier session beside the one they were given."""
        if (forwarded := request.get(FORWARDED)) is not None and forwarded.is_admin:
            return [self.admin_key]  # it came with the key of the process that it came to
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        keys = [token.strip()] if scheme.lower() == "bearer" and token else []
        return keys + request.headers.getall("x-api-key", [])[:1]

    def _seen(self, request: web.Request, session: Session, body: bytes) -> Seen | None:
        """What the session that a request means has sent before; calls that have none share nothing."""
        if session is not self.sessions.untraced:
            return session.seen
        hint = own_session(request.headers.get("x-session-id")) or bodies.session(body)
        with suppress(RequestError):  # which is told once the body is read
            return self.sessions.find(hint).seen if hint is not None else None
        return None

    def _named(self, request: web.Request, session: Session, named: str | None) -> Session:
        """The session that a header or the body names, where neither path nor key has chosen one already.

        Raises RequestError where it is not there, or no more: it may have been deleted while the body was read.
        """
        if session is not self.sessions.untraced:
            return self.sessions.find(session.id)
        hint = own_session(request.headers.get("x-session-id")) or named
        return session if hint is None else self.sessions.find(hint)

    def _check_auxiliary(self, method: str, path: str, session: Session, key: str | None) -> None:
        """Refuse what is not passed on; the admin's key has everything passed that an engine's server may answer."""
        is_admin = session is self.sessions.untraced or self.sessions.holds_admin(key)
        if is_admin and self._passthrough is not None:
            return
        if path in paths.POSTED:
            told = f"{path} answers POST alone, not {method}"
            raise RequestError(told, status=405, retry=False, headers={"allow": "POST"})
        if (address := paths.meant(path)) is not None:
            told = f"{path} is not an address of this gateway; did you mean {address}?"
            told += " an OpenAI base URL ends in /v1, the Anthropic base URL has no /v1"
            raise RequestError(told, status=404, retry=False)
        if is_admin:
            return
        if not path.startswith(self.config.gateway.passthrough):
            raise RequestError(f"{method} {path} is not an address of this gateway", status=404, retry=False)
        if paths.is_engine_control(path):
            raise RequestError(f"{path} controls the engine; it needs {ADMIN_KEY_REMEDY}", status=403, retry=False)
        if session.traced and paths.is_unrecorded_generation(method, path):
            told = f"{method} {path} would go unrecorded; use one of {', '.join(sorted(paths.GENERATION))}"
            raise RequestError(told, status=501, retry=False)


_MOST_TRIES, _RETRY_S = 40, 0.05
MAX_WAITING = 4096  # connections; one that finds no place tries again, a second later at the earliest
_REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # who listens on every address is found at this one
_DIALECTS: dict[str, Dialect] = {"messages": messages, "responses": responses}


def _dialect(path: str, request: web.Request) -> Dialect:
    """Whose errors a client understands: by the path, and by the header that one protocol's clients send everywhere."""
    if not path.startswith("/v1/"):
        return messages if "anthropic-version" in request.headers else chat
    word = path.split("/")[2]
    return _DIALECTS.get(word) or (messages if "anthropic-version" in request.headers and word != "chat" else chat)


def _error(e: Exception, dialect: Dialect, is_admin_address: bool) -> web.Response:
    if not is_admin_address:
        told = dialect.error(e)
        body = told.body
    else:
        told = chat.error(e)
        detail = orjson.loads(told.body)["error"]
        body = orjson.dumps({"error": {"type": detail["type"], "message": detail["message"]}})
    return web.Response(status=told.status, headers=told.headers, body=body)


def cannot_listen(host: str, port: int, e: OSError) -> ConfigError:
    told = f"gateway.port: cannot listen on {host}:{port}: {e.strerror or e}"
    return ConfigError(f"{told}; choose another port, 0 takes a free one")


def new_admin_key() -> str:
    """From STENO_ADMIN_KEY, or random."""
    return os.environ.get("STENO_ADMIN_KEY") or SESSION_PREFIX + "admin_" + secrets.token_hex(16)


def _model(name: str) -> dict[str, Any]:
    """The model as the clients of every protocol read it."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "stenograph"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _json(payload: object) -> web.Response:
    return web.Response(
        body=payload if isinstance(payload, bytes) else orjson.dumps(payload), content_type="application/json"
    )
