"""Chat completions over HTTP: text leaves as it is sampled, whatever ends the turn leaves after its commit."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress

from aiohttp import web

from stenograph.dialects import chat
from stenograph.dialects.chat import ChatReply, ChatRequest
from stenograph.errors import RequestError, StenographError
from stenograph.gateway.sessions import Session
from stenograph.gateway.turns import Committed, Turns
from stenograph.rendering.base import Delta

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
Shown = Delta | Committed | Exception


class ChatRoute:
    """Answers POST /v1/chat/completions."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def answer(self, request: web.Request, session: Session, asked: ChatRequest) -> web.StreamResponse:
        id = "chatcmpl-" + secrets.token_hex(12)
        reply = ChatReply(id, int(time.time()), asked, self._turns.rendering.decode)
        shown: asyncio.Queue[Shown] = asyncio.Queue()
        session.start(self._take(session, asked, shown))
        if asked.stream:
            return await self._stream(request, reply, shown)
        while isinstance(item := await shown.get(), Delta):
            continue
        if isinstance(item, Exception):
            raise item
        return web.Response(body=reply.whole(item.turn, item.num_prompt), content_type="application/json")

    async def _take(self, session: Session, asked: ChatRequest, shown: asyncio.Queue[Shown]) -> None:
        """Run the turn as the session's own task; whoever still listens hears of its text and of its end."""
        try:
            shown.put_nowait(await self._turns.take(session, asked.conversation, asked.asked, shown.put_nowait))
        except asyncio.CancelledError:
            shown.put_nowait(RequestError(f"session {session.id} was closed meanwhile", status=409, retry=False))
            raise
        except Exception as e:
            shown.put_nowait(e)

    async def _stream(self, request: web.Request, reply: ChatReply, shown: asyncio.Queue[Shown]) -> web.StreamResponse:
        item = await shown.get()
        if isinstance(item, Exception):
            raise item  # nothing was sent yet, so that the answer can still be a status
        stream = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        try:
            await stream.prepare(request)
            await stream.write(reply.begin())
            while isinstance(item, Delta):
                await stream.write(reply.delta(item.content, item.reasoning))
                item = await _next(shown, stream)
            if isinstance(item, Exception):
                await _break_off(request, stream, item)
            else:
                await stream.write(reply.end(item.turn, item.num_prompt))
                await stream.write_eof()
        except ConnectionError:
            log.debug("a client went away; its turn is finished and recorded all the same")
        except Exception as e:
            await _break_off(request, stream, e)
        return stream


async def _next(shown: asyncio.Queue[Shown], stream: web.StreamResponse) -> Shown:
    while True:
        try:
            return await asyncio.wait_for(shown.get(), KEEP_ALIVE_S)
        except TimeoutError:
            await stream.write(chat.KEEP_ALIVE)


async def _break_off(request: web.Request, stream: web.StreamResponse, e: Exception) -> None:
    """Say the error and close without the protocol's end or HTTP's: nobody may take this for an answer."""
    if not isinstance(e, StenographError):
        log.error("bug while streaming", exc_info=e)
    with suppress(ConnectionError):
        await stream.write(chat.error_event(e))
    if request.transport is not None:
        request.transport.close()
