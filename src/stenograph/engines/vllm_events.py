"""What vLLM says: of each event what a turn needs, typed; a prompt that comes back is compared as text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson
from msgspec import Meta, Raw, Struct

from stenograph.engines.base import Chunk
from stenograph.engines.http import quoted, words
from stenograph.errors import EngineError
from stenograph.types import Ids

_LARGEST = float(np.finfo(np.float32).max)


Id = Annotated[int, Meta(ge=0, lt=2**31)]


class _Logprobs(Struct):
    token_logprobs: list[Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]]


class _Choice(Struct):
    index: Literal[0]
    token_ids: list[Id]
    logprobs: _Logprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    prompt_token_ids: Raw = Raw()


class _Event(Struct):
    choices: Annotated[list[_Choice], Meta(max_length=1)] | None = None
    error: Any = None
    object: str | None = None


class _Tokens(Struct):
    tokens: list[Id]


_events = msgspec.json.Decoder(_Event)
_tokens = msgspec.json.Decoder(_Tokens)


async def read_events(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The data of each event, one line each. Lines are cut anywhere and of any length: they are joined once."""
    held: list[bytes] = []
    async for piece in pieces:
        *lines, rest = piece.split(b"\n")
        for line in lines:
            whole = b"".join((*held, line))
            held.clear()
            if whole.startswith(b"data:"):
                yield whole[5:].strip()
        if rest:
            held.append(rest)


def read_event(data: bytes) -> tuple[Chunk, Raw] | None:
    """What was sampled, and the JSON of the prompt that is echoed, if any; None where the event tells of usage alone.

    Raises EngineError for an error that the engine tells of, and for what is no event of a vLLM server.
    """
    try:
        event = _events.decode(data)
    except (msgspec.DecodeError, RecursionError) as e:
        raise EngineError(f"the engine sent an event that cannot be read: {e}, got {quoted(data)}") from e
    if event.error is not None or event.object == "error":
        raise _told(event.error if event.error is not None else orjson.loads(data))
    if event.choices is None:
        raise EngineError(f"the engine sent an event without choices: {quoted(data)}; is it a vLLM server?")
    if not event.choices:
        return None
    choice = event.choices[0]
    logprobs = choice.logprobs.token_logprobs if choice.logprobs is not None else []
    if len(choice.token_ids) != len(logprobs):
        told = f"{len(logprobs)} logprobs for {len(choice.token_ids)} tokens"
        raise EngineError(f"the engine sent {told}; is it a vLLM server?")
    ids, numbers = np.array(choice.token_ids, np.int32), np.array(logprobs, np.float32)
    return Chunk(ids, numbers, 0, choice.finish_reason), choice.prompt_token_ids


def read_tokens(data: bytes) -> list[int]:
    """The ids that `/tokenize` answers with. Raises EngineError."""
    try:
        return _tokens.decode(data).tokens
    except (msgspec.DecodeError, RecursionError) as e:
        raise EngineError(f"the engine's answer cannot be read: {e}, got {quoted(data)}") from e


def check_echo(echo: Raw, text: bytes, sent: Ids) -> None:
    """Raise EngineError unless the engine works on the prompt `sent`, which went to it as the JSON `text`."""
    echoed = bytes(echo)
    if echoed in (b"", b"null"):
        raise EngineError("the engine did not echo the prompt; vLLM must be 0.10.2 or later (return_token_ids)")
    if echoed == text or echoed.replace(b" ", b"") == text:
        return
    try:
        ids = np.asarray(orjson.loads(echoed))
    except (ValueError, OverflowError):  # lists within the list; a number past 64 bits
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise EngineError("the engine's prompt_token_ids are no list of ids; is it a vLLM server?")
    if len(ids) != len(sent):
        raise EngineError(f"the engine echoed {len(ids)} prompt tokens, {len(sent)} were sent; does a proxy edit them?")
    if len(differ := np.flatnonzero(ids != sent)):
        at = int(differ[0])
        raise EngineError(f"the engine echoed another prompt: token {at} is {ids[at]}, {sent[at]} was sent")


def _told(error: Any) -> EngineError:
    """An error in a stream that had begun; `code` is the status that it would have had."""
    code = error.get("code") if isinstance(error, dict) else None
    status = code if type(code) is int and 400 <= code < 600 else 500
    return EngineError(f"the engine failed: {words(orjson.dumps(error))}", status=status)
