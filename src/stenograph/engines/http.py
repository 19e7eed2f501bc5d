"""How an engine's server is asked: an answer of status 200, or an error that says on one line what came instead."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import orjson

from stenograph.errors import EngineError, EngineUnavailable

HEADERS = {"content-type": "application/json", "accept-encoding": "identity"}  # of every request
CONNECT_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 3.0  # servers close an idle connection after 5; a request sent into that moment would fail
_ASK_TIMEOUT_S = 30.0  # for what the server answers without generating
_TOLD_CHARS = 1000


@asynccontextmanager
async def answer(
    session: aiohttp.ClientSession, method: str, url: str, body: bytes | None = None, timeout_s: float | None = None
) -> AsyncIterator[aiohttp.ClientResponse]:
    """An answer of status 200, closed at the end, read out or not: that is how vLLM learns that nobody listens.

    Raises EngineUnavailable where the server cannot be reached, EngineError for another status or a cut.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s, connect=CONNECT_TIMEOUT_S)
    try:
        response = await session.request(method, url, data=body, timeout=timeout, allow_redirects=False)
    except (aiohttp.ClientError, OSError) as e:
        raise unreachable(url, e) from e
    try:
        if response.status != 200:
            raise _refusal(response, await response.content.read(2**16))
        yield response
    except (aiohttp.ClientError, OSError) as e:
        raise EngineError(f"the engine's answer was cut short: {str(e) or type(e).__name__}") from e
    finally:
        response.close()


def unreachable(url: str, e: Exception) -> EngineUnavailable:
    return EngineUnavailable(
        f"the engine at {url} cannot be reached: {str(e) or type(e).__name__}; is its server running?"
    )


async def ask(session: aiohttp.ClientSession, method: str, url: str, body: bytes | None = None) -> bytes:
    """The whole of an answer that is given without generating."""
    async with answer(session, method, url, body, _ASK_TIMEOUT_S) as response:
        return await response.read()


def read_json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as e:
        raise EngineError(f"the engine's answer cannot be read: {e}, got {quoted(data)}") from e


def _refusal(response: aiohttp.ClientResponse, body: bytes) -> EngineError:
    """What a status other than 200 means. Ours to tell are 4xx and 5xx, but not 401: the agent's own key was good."""
    status = response.status if 400 <= response.status < 600 and response.status != 401 else 502
    retry_after_s = _seconds(response.headers.get("retry-after"))
    message = f"the engine answered {response.status}: {words(body)}"
    if response.status == 401:
        message += "; set STENO_ENGINE__API_KEY to the key that its server was started with (--api-key)"
    if status == 503:
        return EngineUnavailable(message, retry_after_s=retry_after_s)
    return EngineError(message, status=status, retry_after_s=retry_after_s)


def words(body: bytes) -> str:
    """The words of an error body, in whichever of the shapes that servers use, on one line."""
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        said = body.decode(errors="replace")
    for name in ("error", "message", "detail"):
        if isinstance(said, dict) and said.get(name):
            said = said[name]
    try:
        text = said if isinstance(said, str) else orjson.dumps(said).decode()
    except TypeError:  # it reads what is too deep for it to write
        text = body.decode(errors="replace")
    return " ".join(text.split())[:_TOLD_CHARS] or "nothing"


def _seconds(text: str | None) -> float | None:
    """Retry-After in seconds from now, whether it counts them or gives a date; None where it does neither."""
    try:
        seconds = float(text or "")
    except ValueError:
        try:
            date = parsedate_to_datetime(text or "")
        except (ValueError, OverflowError):
            return None
        return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - time.time())
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def quoted(value: object) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 80 else text[:80] + "..."
