"""Bodies of requests: read whole, or refused with the reason."""

from __future__ import annotations

import msgspec
from aiohttp import web

from stenograph.dialects.base import own_session
from stenograph.errors import RequestError


async def read(request: web.Request) -> bytes:
    """Raises RequestError where the body is too large, or cannot be read."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as e:
        told = f"the body is larger than {request.client_max_size} bytes; raise gateway.max_body_bytes"
        raise RequestError(told, status=413, retry=False) from e
    except (web.RequestPayloadError, ConnectionError) as e:
        raise RequestError(f"the body cannot be read: {e}") from e


class _Naming(msgspec.Struct):
    session_id: str | None = None


def session(body: bytes) -> str | None:
    """The session of ours that `body` names, before it is read; None also where it cannot be."""
    try:
        return own_session(msgspec.json.decode(body, type=_Naming).session_id)
    except (msgspec.DecodeError, RecursionError):
        return None
