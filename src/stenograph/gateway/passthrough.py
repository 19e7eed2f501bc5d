"""Auxiliary requests, to the engine's own server and back byte for byte, but for what is ours: keys, session ids."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from urllib.parse import quote

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, MultiMapping
from pydantic import SecretStr
from yarl import URL

from stenograph.dialects.base import own_session
from stenograph.engines.http import CONNECT_TIMEOUT_S, KEEP_ALIVE_S, unreachable
from stenograph.gateway.hops import passed_on, sent_on

_CREDENTIALS = ("authorization", "proxy-authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie")
_ANTHROPIC_VERSION = "2023-06-01"


class Passthrough:
    """Speaks to one server, with `api_key` where it asks for one.

    Nothing of one client's answer, such as a cookie, is kept for another's request.
    """

    def __init__(self, server: str, api_key: SecretStr | None = None) -> None:
        self._server = server.rstrip("/")
        self._api_key = api_key
        self._session: aiohttp.ClientSession | None = None  # made on the loop that serves
        self._open: set[aiohttp.ClientResponse] = set()

    async def forward(self, request: web.Request, path: str, body: bytes) -> web.StreamResponse:
        """Ask the server for `path` (normalised, decoded) and pass its answer on as it comes, whatever its status.

        A client that leaves cancels this, which closes the connection to the server. Raises EngineUnavailable while
        there is no answer to pass on; an answer that is cut ends the client's connection where it was cut.
        """
        answer = await self._ask(request, path, body)
        self._open.add(answer)
        try:
            response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=passed_on(answer.headers))
            await response.prepare(request)
            try:
                async for piece in answer.content.iter_any():
                    await response.write(piece)
            except (aiohttp.ClientError, OSError):  # a client's own reset too: then there is nothing left to close
                if request.transport is not None:
                    request.transport.close()  # after what was written, and without HTTP's last chunk
                return response
            await response.write_eof()
            return response
        finally:
            self._open.discard(answer)
            answer.close()  # of no effect once it is read to its end: that connection serves again

    async def aclose(self) -> None:
        for answer in self._open:  # closing the session alone would leave their readers waiting
            answer.close()
        if self._session is not None:
            await self._session.close()

    async def _ask(self, request: web.Request, path: str, body: bytes) -> aiohttp.ClientResponse:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
            )
        _, mark, query = request.raw_path.partition("?")
        url = URL(self._server + quote(path, safe="/:@!$&'()*+,;=~") + mark + query, encoded=True)
        headers, sent = _sent_on(request.headers, path), without_session(body)
        if self._api_key is not None:
            headers["authorization"] = f"Bearer {self._api_key.get_secret_value()}"
        try:
            return await self._session.request(
                request.method, url, headers=headers, data=sent or None, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError) as e:
            raise unreachable(self._server, e) from e


def without_session(body: bytes) -> bytes:
    """`body` less its top-level `session_id`, where it is a JSON object in which that names a session of ours.

    Every other byte stays: the member is cut out with one comma.
    """
    if b'"session_id"' not in body and b"\\u" not in body:
        return body
    try:
        text = body.decode()
        members = _members(text)
    except (ValueError, RecursionError):  # no object that anyone could read a session from
        return body
    cuts: list[tuple[int, int]] = []
    kept_comma: int | None = None  # after the last member that stays
    for member in members:
        if member.key == "session_id" and own_session(member.value) is not None:
            cuts.append((member.start, member.end if member.comma is None else member.comma + 1))
        else:
            kept_comma = member.comma
    if not cuts:
        return body
    if kept_comma is not None:  # nothing follows it any more
        cuts.append((kept_comma, kept_comma + 1))
    kept, at = "", 0
    for start, end in sorted(cuts):
        kept += text[at:start]
        at = end
    return (kept + text[at:]).encode()


@dataclass(frozen=True, slots=True)
class _Member:
    """One member of an object: text[start:end] from its name to its value, and where its comma is."""

    key: str
    value: object
    start: int
    end: int
    comma: int | None


# Numbers keep their spelling, which nobody reads: reading them would cost, and fail beyond 4300 digits.
_VALUES = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
_WHITE = re.compile(r"[ \t\n\r]*")


def _members(text: str) -> list[_Member]:
    """The members of the object that `text` is. Raises ValueError where it is none."""
    members: list[_Member] = []
    at = end = _past("{", text, 0)
    more = not text.startswith("}", _white(text, at))
    while more:
        start = _white(text, at)
        key, at = _VALUES.raw_decode(text, start)
        if not text.startswith('"', start):
            raise ValueError("a name must be a text")
        value, end = _VALUES.raw_decode(text, _white(text, _past(":", text, at)))
        at = _white(text, end)
        more = text.startswith(",", at)
        members.append(_Member(key, value, start, end, at if more else None))
        at += 1
    if _white(text, _past("}", text, end)) != len(text):
        raise ValueError("something follows the object")
    return members


def _past(mark: str, text: str, at: int) -> int:
    at = _white(text, at)
    if not text.startswith(mark, at):
        raise ValueError(f"{mark} must be at {at}")
    return at + 1


def _white(text: str, at: int) -> int:
    match = _WHITE.match(text, at)
    assert match is not None  # it may be empty
    return match.end()


def _sent_on(headers: MultiMapping[str], path: str) -> CIMultiDict[str]:
    """The headers of a request, less those of the hop, the host, the client's credentials and a session of ours."""
    sent = sent_on(headers, "host", *_CREDENTIALS)
    if own_session(sent.get("x-session-id")) is not None:
        sent.popall("x-session-id")
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        sent.setdefault("anthropic-version", _ANTHROPIC_VERSION)
    return sent
