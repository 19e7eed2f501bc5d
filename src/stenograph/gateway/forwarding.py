"""A request for a session that another process has is answered there, and passed on here, as if there were one process.

The gateways over one journal reach one another at Unix sockets, in folders that their user alone may enter. So whoever
asks there is believed what it says of a request's rights; it was authorised where it arrived.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from urllib.parse import quote

import aiohttp
from aiohttp import web
from yarl import URL

from stenograph.dialects.base import Dialect
from stenograph.errors import EngineUnavailable
from stenograph.gateway import bodies
from stenograph.gateway.hops import passed_on, sent_on

# Headers between gateways alone: clients' own are left out on the way.
_RIGHTS = "x-steno-rights"  # of a request: "admin", or "agent" for what its key opens
_RECEIPT = "x-steno-receipt"  # of an answer: what to say once its client has it, in a request with this header

_KEPT_S = 600.0  # a connection without a request: also what a client may take for the last bytes
_MAX_FOLDER = 80  # characters; a Unix socket's whole path has room for some 100


class Gone(Exception):
    """The process that had a session takes no requests any more."""


@dataclass(slots=True, eq=False)
class Forwarded:
    """What is known of a request that another process forwarded."""

    is_admin: bool
    receipt: str = field(default_factory=lambda: secrets.token_hex(8))
    is_received: asyncio.Event = field(default_factory=asyncio.Event)  # by the client


FORWARDED = web.RequestKey("forwarded", Forwarded)


@contextmanager
def private_address() -> Iterator[str]:
    """Where other processes of this user reach this one."""
    long = len(tempfile.gettempdir()) > _MAX_FOLDER
    with tempfile.TemporaryDirectory(prefix="steno-", dir="/tmp" if long else None) as folder:
        yield str(Path(folder) / "gateway")


class Arrivals:
    """The receiving end: what other processes forward to `address`, answered by `handle`."""

    def __init__(self, address: str, handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
        self._address = address
        self._handle = handle
        self._awaited: dict[str, Forwarded] = {}  # by receipt
        self._runner: web.AppRunner | None = None

    async def start(self, max_body_bytes: int, backlog: int) -> None:
        app = web.Application(client_max_size=max_body_bytes)
        app.router.add_route("*", "/{path:.*}", self._arrived)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await self._runner.setup()
        await web.UnixSite(self._runner, self._address, backlog=backlog).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _arrived(self, request: web.Request) -> web.StreamResponse:
        if (receipt := request.headers.get(_RECEIPT)) is not None:
            if (awaited := self._awaited.get(receipt)) is not None:
                awaited.is_received.set()
            return web.Response(status=204)
        forwarded = Forwarded(request.headers.get(_RIGHTS) == "admin")
        request[FORWARDED] = forwarded
        self._awaited[forwarded.receipt] = forwarded
        try:
            return await self._handle(request)
        finally:
            del self._awaited[forwarded.receipt]


def receipt(request: web.Request) -> dict[str, str]:
    """The header that asks whoever forwarded `request` to say when its client has the answer."""
    forwarded = request.get(FORWARDED)
    return {_RECEIPT: forwarded.receipt} if forwarded is not None else {}


async def deliver(request: web.Request, response: web.StreamResponse, rest: bytes = b"") -> None:
    """Send the rest; returns when the last byte left for the client, from whichever process, and the client was there.

    Raises ConnectionResetError where it was not. A process that forwarded the request closes its connection then, which
    cancels this.
    """
    if request.transport is not None:
        request.transport.set_write_buffer_limits(high=0)  # so that draining waits for an empty buffer
    await response.write_eof(rest)
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the client went away")
    if (forwarded := request.get(FORWARDED)) is not None:
        await forwarded.is_received.wait()


class Forwarder:
    """The sending end. A connection is one request's until its answer is delivered, and only then another's."""

    def __init__(self) -> None:
        self._free: defaultdict[str, list[aiohttp.ClientSession]] = defaultdict(list)  # by address

    async def forward(
        self, request: web.Request, address: str, dialect: Dialect, *, is_admin: bool
    ) -> web.StreamResponse:
        """Ask the process at `address` and pass its answer on as it comes, byte for byte.

        Raises Gone where it does not answer, ConnectionError where the client went away; the other process then sees a
        client that goes away. An answer that is cut ends the client's connection where it was cut.
        """
        body = await bodies.read(request)
        headers = sent_on(request.headers, _RIGHTS, _RECEIPT)
        headers[_RIGHTS] = "admin" if is_admin else "agent"
        async with self._connection(address) as connection:
            try:
                answer = await connection.request(
                    request.method, _url(request), headers=headers, data=body or None, allow_redirects=False
                )
            except (aiohttp.ClientError, OSError) as e:
                raise Gone(address) from e
            try:
                headers = passed_on(answer.headers)
                asked = headers.pop(_RECEIPT, None)
                response = _Passed(status=answer.status, reason=answer.reason, headers=headers)
                await response.prepare(request)
                if not await _pass_on(answer, response):
                    await _break_off(request, response, connection, dialect)
                    return response
                await deliver(request, response)
                if asked is not None:
                    await _say(connection, asked)
                return response
            finally:
                answer.close()  # of no effect once it is read to its end

    async def aclose(self) -> None:
        for connection in chain(*self._free.values()):
            await connection.close()

    @asynccontextmanager
    async def _connection(self, address: str) -> AsyncIterator[aiohttp.ClientSession]:
        """Closed where the request has no good end: by that the other process knows that nobody listens."""
        free = self._free[address]
        connection = free.pop() if free else _connected(address)
        try:
            yield connection
        except BaseException:
            await connection.close()
            raise
        free.append(connection)


class _Passed(web.StreamResponse):
    """Its head leaves with its first bytes, as it came."""

    _send_headers_immediately = False


def _connected(address: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(address, keepalive_timeout=_KEPT_S),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
    )


def _url(request: web.Request) -> URL:
    return URL("http://gateway" + quote(request.rel_url.raw_path_qs, safe="/:@!$&'()*+,;=~?%"), encoded=True)


async def _pass_on(answer: aiohttp.ClientResponse, response: web.StreamResponse) -> bool:
    """Whether all of the answer came; the last piece is then what the client awaits."""
    while True:
        try:
            piece = await answer.content.readany()
        except (aiohttp.ClientError, OSError):
            return False
        if not piece:
            return True
        await response.write(piece)


async def _break_off(
    request: web.Request, response: web.StreamResponse, connection: aiohttp.ClientSession, dialect: Dialect
) -> None:
    """Close without HTTP's end. A process that is still there has told why in its stream; one that died did not."""
    if response.content_type == "text/event-stream" and not await _say(connection, ""):
        died = EngineUnavailable("the process that has this session ended; send the request again")
        # The empty lines end an event that was cut, too.
        await response.write(b"\n\nevent: error\ndata: " + dialect.error(died).body + b"\n\n")
    if request.transport is not None:
        request.transport.close()


async def _say(connection: aiohttp.ClientSession, receipt: str) -> bool:
    """Say that a client has an answer; whether the other process is there to hear it.

    By another host's name, which is another connection: the answer's is held until this is said.
    """
    try:
        async with connection.post("http://receipts/", headers={_RECEIPT: receipt}):
            return True
    except (aiohttp.ClientError, OSError):
        return False
