"""Answers over HTTP, in any protocol: text leaves as it is sampled, whatever ends a turn leaves after its commit."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

import orjson
from aiohttp import web

from stenograph.config import Config
from stenograph.dialects.base import KEEP_ALIVE, Request, Writer
from stenograph.errors import RequestError, StenographError
from stenograph.gateway.calls import Call, State
from stenograph.gateway.forwarding import deliver, receipt
from stenograph.gateway.sessions import Session
from stenograph.gateway.turns import Turns
from stenograph.traces.digests import conversation_labels
from stenograph.traces.store import TraceStore
from stenograph.traces.trace import TurnState

log = logging.getLogger(__name__)


class _EventStream(web.StreamResponse):
    """Its head leaves with its first events: each write wakes the client, and costs more than what is written."""

    _send_headers_immediately = False


class Answers:
    """Answers the generation requests. A request is given a call of its own, or one whose client went away."""

    def __init__(self, turns: Turns, store: TraceStore, config: Config) -> None:
        self._turns = turns
        self._store = store
        self._settings = config.gateway
        self._max_tokens = config.sampling.max_tokens

    async def answer(self, http: web.Request, session: Session, request: Request) -> web.StreamResponse:
        """Raises what went wrong while nothing was sent yet; later errors are told in the stream."""
        session.require_open()
        request = session.stored.resolve(request, self._store.tree(session.id) if session.traced else None)
        call = self._call(session, request, http.headers)
        call.join()
        try:
            send = self._stream if request.stream else self._whole
            return await send(http, session, call, request)
        finally:
            # Also where this task is cancelled: then the client closed its connection, or its half of it.
            self._left(session, call)

    # --- the answer ----------------------------------------------------------------------------------------------

    async def _whole(self, http: web.Request, session: Session, call: Call, request: Request) -> web.StreamResponse:
        await call.hear(math.inf)
        if call.error is not None:
            raise call.error
        body = self._writer(call, request).whole(call.answered)
        response = web.Response(body=body, content_type="application/json", headers=_named(call) | receipt(http))
        await response.prepare(http)
        await self._deliver(http, session, call, response)
        return response

    async def _stream(self, http: web.Request, session: Session, call: Call, request: Request) -> web.StreamResponse:
        heard = await call.hear(0, self._settings.keep_alive_s)
        if call.error is not None:
            raise call.error  # nothing was sent yet, so that the answer can still be a status
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache", **_named(call), **receipt(http)}
        stream = _EventStream(headers=headers)
        await stream.prepare(http)
        try:
            while not heard:
                await stream.write(KEEP_ALIVE)  # and the head
                heard = await call.hear(0, self._settings.keep_alive_s)
            await self._write(http, session, call, stream, self._writer(call, request))
        except ConnectionError:
            log.debug("a client went away; a repeat of its request may have the answer")
        return stream

    def _writer(self, call: Call, request: Request) -> Writer:
        """Only from the first that is heard of a call on: until its prompt is known, its name may change."""
        return request.writer(call.name, int(call.received_s), self._turns.rendering.decode)

    async def _write(
        self, http: web.Request, session: Session, call: Call, stream: web.StreamResponse, writer: Writer
    ) -> None:
        """Write what is shown, and how it ends."""
        try:
            await self._tell(stream, call, writer)
            if call.error is None:
                await self._deliver(http, session, call, stream, writer.end(call.answered))
            else:
                await _break_off(http, stream, writer, call.error)
        except ConnectionError:
            raise
        except Exception as e:
            await _break_off(http, stream, writer, e)

    async def _tell(self, stream: web.StreamResponse, call: Call, writer: Writer) -> None:
        """Write what is shown until all is over."""
        position, begun = 0, False
        while not begun or not call.over or position < len(call.shown):
            if not await call.hear(position, self._settings.keep_alive_s):
                await stream.write(KEEP_ALIVE)
                continue
            if call.error is not None and position == len(call.shown):
                return
            events = [] if begun else [writer.begin(call.num_prompt)]
            begun = True
            events += [writer.delta(choice, text.content, text.reasoning) for choice, text in call.shown[position:]]
            position = len(call.shown)
            await stream.write(b"".join(events))

    async def _deliver(
        self, http: web.Request, session: Session, call: Call, response: web.StreamResponse, rest: bytes = b""
    ) -> None:
        """Hand over the rest. Delivered means: the last byte left for the client while its connection stood."""
        await deliver(http, response, rest)
        self._mark(session, call, State.DELIVERED)

    # --- the call ------------------------------------------------------------------------------------------------

    def _call(self, session: Session, request: Request, headers: Mapping[str, str]) -> Call:
        """The call of a client that went away and asked the same, or a new one."""
        key = _key(request)
        max_tokens = min(request.asked.get("max_tokens", self._max_tokens), self._max_tokens)
        for call in session.calls.get(key, ()) if session.id else ():  # what has no session is nobody's to repeat
            if call.answers(key, max_tokens):
                return call
        recorded = self._recorded(session, request, key, max_tokens)
        if not recorded:
            self._check_limits(session, request.num_choices)
        call = Call(request, headers, key, max_tokens)
        session.start(call, self._take(session, call, recorded))
        return call

    def _recorded(self, session: Session, request: Request, key: str, max_tokens: int) -> tuple[str, ...]:
        """The turns that an earlier process recorded for the same request and nobody got, as `Call.answers` has it."""
        for turns in session.recorded.get(key, ()):
            held = [self._store.tree(session.id).turn(turn) for turn in turns]
            is_cut = any(turn.finish_reason == "length" for turn in held)
            if len(turns) == request.num_choices and (max_tokens <= held[0].sampling.max_tokens or not is_cut):
                session.recorded[key].remove(turns)
                return turns
        return ()

    async def _take(self, session: Session, call: Call, recorded: Sequence[str]) -> None:
        if recorded:
            await self._turns.tell_again(session, call, recorded)
        else:
            await self._turns.take(session, call)
        if call.answered:
            if not session.traced:
                session.stored.keep(call.name, call.request, call.answered[0])
            if not call.has_client:
                self._mark(session, call, State.UNDELIVERED)

    def _check_limits(self, session: Session, num_choices: int) -> None:
        limits = self._settings
        calls = [call for same in session.calls.values() for call in same]
        in_flight = sum(call.request.num_choices for call in calls if not call.over)
        if (
            limits.session_max_turns is not None
            and session.num_turns + in_flight + num_choices > limits.session_max_turns
        ):
            told = f"this session may take {limits.session_max_turns} turns (gateway.session_max_turns); open another"
            raise RequestError(told, code="session_limit_exceeded", retry=False)
        if limits.session_max_tokens is not None and session.num_tokens >= limits.session_max_tokens:
            told = f"this session has sampled {session.num_tokens} tokens, {limits.session_max_tokens} are allowed"
            told += " (gateway.session_max_tokens); open another"
            raise RequestError(told, code="session_limit_exceeded", retry=False)

    def _left(self, session: Session, call: Call) -> None:
        """Nobody listens to `call` any more; unless it was delivered, a repeat may still come."""
        kept = session.id and self._settings.on_disconnect == "commit"
        call.leave(self._settings.disconnect_timeout_s if kept else 0)
        if call.state is State.COMMITTED:
            self._mark(session, call, State.UNDELIVERED)

    def _mark(self, session: Session, call: Call, state: State) -> None:
        """Say in the record whether the agent got its answer."""
        call.advance(state)
        if state is State.DELIVERED or not session.id:
            session.forget(call)
        if session.traced:
            try:
                self._store.mark(session.id, [one.turn.id for one in call.answered], _MARKS[state])
            except Exception as e:  # the turn is recorded, and its client served; the session may be released
                log.warning("session %s: a turn is not marked %s: %s", session.id, state, e)


_MARKS: dict[State, TurnState] = {State.DELIVERED: "delivered", State.UNDELIVERED: "undelivered"}


def _key(request: Request) -> str:
    """Equal for requests that ask the same: not the same bytes, for clients change what means nothing."""
    grammar = orjson.dumps(request.grammar, option=orjson.OPT_SORT_KEYS)
    # The response that is stored is what the next request goes on from, so how it is stored counts too.
    others = [request.conversation.continues, request.num_choices, request.store, request.num_instructions]
    said = b"".join(conversation_labels(request.conversation))
    return hashlib.blake2b(said + orjson.dumps(others) + grammar, digest_size=16).hexdigest()


def _named(call: Call) -> dict[str, str]:
    """The request's id, by either protocol's name: some clients ask again after an error only where there is one."""
    return dict.fromkeys(("x-request-id", "request-id"), f"req_{call.name}")


async def _break_off(http: web.Request, stream: web.StreamResponse, writer: Writer, e: Exception) -> None:
    """Say the error and close without the protocol's end or HTTP's: nobody may take this for an answer."""
    if not isinstance(e, StenographError):
        log.error("bug while streaming", exc_info=e)
    with suppress(ConnectionError):
        await stream.write(writer.failed(e))
    if http.transport is not None:
        http.transport.close()
