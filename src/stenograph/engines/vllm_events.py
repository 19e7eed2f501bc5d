"""What vLLM says: of each event what a turn needs, typed; a prompt that comes back is compared as text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson
from msgspec import Meta, Raw, Struct

from stenograph.engines.base import Chunk
from stenograph.engines.http import quoted, read_json, words
from stenograph.errors import EngineError
from stenograph.types import Ids

_LARGEST = float(np.finfo(np.float32).max)
_NOTHING = (b"", b"null")

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


async def read_events(pieces: AsyncIterator[bytes], *, apart: bool = False) -> AsyncGenerator[list[bytes], None]:
    """The data of the events that came together, one line each, or of each. Lines are cut anywhere, and joined once."""
    held: list[bytes] = []
    async for piece in pieces:
        *lines, rest = piece.split(b"\n")
        if lines:
            lines[0] = b"".join((*held, lines[0]))
            held.clear()
        if rest:
            held.append(rest)
        if events := [line[5:].strip() for line in lines if line.startswith(b"data:")]:
            for part in ([one] for one in events) if apart else [events]:
                yield part


@dataclass(slots=True)
class Reader:
    """Reads the events of one answer to the prompt `sent`, which went out as the JSON `text`."""

    text: bytes
    sent: Ids
    num_ids: int = 0
    echoed: bool = False
    done: bool = False  # whether the server said that nothing follows

    def read(self, events: Iterable[bytes]) -> Iterator[Chunk]:
        """One chunk of what the events say, if anything: under load many come together, and each chunk has its price.

        Raises EngineError for what cannot be recorded truly, after the chunk of what was sampled before it.
        """
        ids: list[int] = []
        logprobs: list[float] = []
        finish_reason, error = None, None
        try:
            for data in events:
                if data == b"[DONE]":
                    self.done = True
                    break
                choice = _read_event(data)
                if choice is None:
                    continue
                if not self.echoed or bytes(choice.prompt_token_ids) not in _NOTHING:
                    check_echo(choice.prompt_token_ids, self.text, self.sent)
                    self.echoed = True
                ids += choice.token_ids
                logprobs += choice.logprobs.token_logprobs if choice.logprobs is not None else []
                finish_reason = choice.finish_reason
                if finish_reason is not None:
                    break
        except EngineError as e:
            error = e
        self.num_ids += len(ids)
        if ids or finish_reason is not None:
            yield Chunk(np.array(ids, np.int32), np.array(logprobs, np.float32), 0, finish_reason)
        if error is not None:
            raise error


def _read_event(data: bytes) -> _Choice | None:
    """The one choice of an event; None where it has none (usage)."""
    try:
        event = _events.decode(data)
    except (msgspec.DecodeError, RecursionError) as e:
        raise EngineError(f"the engine sent an event that cannot be read: {e}, got {quoted(data)}") from e
    if event.error is not None or event.object == "error":
        raise _told(data)
    if event.choices is None:
        raise EngineError(f"the engine sent an event without choices: {quoted(data)}; is it a vLLM server?")
    if not event.choices:
        return None
    choice = event.choices[0]
    num_ids, num_logprobs = len(choice.token_ids), len(choice.logprobs.token_logprobs) if choice.logprobs else 0
    if num_ids != num_logprobs:
        raise EngineError(f"the engine sent {num_logprobs} logprobs for {num_ids} tokens; is it a vLLM server?")
    return choice


def read_tokens(data: bytes) -> list[int]:
    """The ids that `/tokenize` answers with. Raises EngineError."""
    try:
        return _tokens.decode(data).tokens
    except (msgspec.DecodeError, RecursionError) as e:
        raise EngineError(f"the engine's answer cannot be read: {e}, got {quoted(data)}") from e


def check_echo(echo: Raw, text: bytes, sent: Ids) -> None:
    """Raise EngineError unless the engine works on the prompt `sent`, which went to it as the JSON `text`."""
    echoed = bytes(echo)
    if echoed in _NOTHING:
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


def _told(data: bytes) -> EngineError:
    """An error in a stream that had begun; `code` is the status that it would have had."""
    said = read_json(data)
    error = said["error"] if said.get("error") is not None else said
    code = error.get("code") if isinstance(error, dict) else None
    status = code if type(code) is int and 400 <= code < 600 else 500
    return EngineError(f"the engine failed: {words(data)}", status=status)
