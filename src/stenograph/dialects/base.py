"""The seam between a protocol and the gateway: a request is read once, an answer is written whole or as events."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from stenograph.dialects.seen import Seen
from stenograph.errors import ContextOverflow, EngineError, RequestError, StenographError
from stenograph.types import Conversation, Ids, Reply, Turn

KEEP_ALIVE = b": keep-alive\n\n"  # a comment in every event stream
SESSION_PREFIX = "steno_"

Decode = Callable[[Ids], str]


@dataclass(frozen=True, slots=True)
class Answered:
    """A turn that is in the record (or, untraced, needs none), as its agent is told of it."""

    turn: Turn
    prompt_ids: Ids
    num_reasoning: int  # tokens of the output up to the last that showed reasoning
    shown: Reply  # the reply, less what the agent had begun itself

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class Request(ABC):
    """What a request asks, in whichever protocol. `asked` holds the sampling values given, by Sampling's names.

    `grammar` is a JSON schema for the answer. `previous` is the id of a stored response that `conversation` goes on
    from; `num_instructions` of its messages hold for this request alone; `references` name the stored responses whose
    replies stand at positions of it. `notes` say what was asked and is not done. `hints` are what the body says of the
    client's own session.
    """

    conversation: Conversation
    asked: Mapping[str, Any]
    model: str = ""
    stream: bool = False
    num_choices: int = 1
    grammar: Mapping[str, Any] | None = None
    session: str | None = None  # a session id of ours in the body
    previous: str | None = None
    store: bool = False
    num_instructions: int = 0
    references: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    hints: Mapping[str, str] = field(default_factory=dict)

    @abstractmethod
    def writer(self, name: str, created: int, decode: Decode) -> Writer:
        """Who writes the answer. Ids in it are made from `name` (hex); `created` is Unix time; `decode` reads ids."""


class Writer(Protocol):
    """Writes one answer to one request. What a client may act on is in `whole` and `end` alone."""

    def whole(self, answered: Sequence[Answered]) -> bytes:
        """The body of an answer that is not streamed, one turn a choice."""
        ...

    def begin(self, num_prompt: int) -> bytes:
        """The events before any text; the prompt has `num_prompt` tokens."""
        ...

    def delta(self, choice: int, content: str, reasoning: str) -> bytes:
        """The events for text that goes on; either may be empty."""
        ...

    def end(self, answered: Sequence[Answered]) -> bytes:
        """The rest of the answer, up to the end of the protocol's stream."""
        ...

    def failed(self, exception: Exception) -> bytes:
        """The event that says an error in a stream that has begun; nothing may follow it."""
        ...


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as it goes over the wire."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Dialect(Protocol):
    """A protocol; the modules beside this one are its implementations."""

    def parse_request(self, body: bytes, seen: Seen | None = None) -> Request:
        """Read a request's body; what `seen` has of it is the same objects again.

        Raises RequestError (400) that names the field.
        """
        ...

    def error(self, exception: Exception) -> HttpError: ...


def own_session(value: object) -> str | None:
    """`value` where it is a session id of ours; clients put ids of their own in the same places."""
    return value if isinstance(value, str) and value.startswith(SESSION_PREFIX) else None


Kind = Literal[
    "invalid_request", "authentication", "permission", "not_found", "too_large", "rate_limit", "overloaded", "engine",
    "internal",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as every protocol tells it: a status, a kind that it has a word for, and one line."""

    status: int
    kind: Kind
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    overflow: tuple[int, int] | None = None  # tokens in the prompt, tokens that the context holds


def failure(exception: Exception) -> Failure:
    """Statuses of the engine's own 4xx, 429 and 503 stay; its other failures are 502; 500 means ours."""
    message = str(exception)
    headers: dict[str, str] = {}
    code = param = overflow = None
    match exception:
        case ContextOverflow():
            status, kind, code = 400, "invalid_request", "context_length_exceeded"
            overflow = exception.num_tokens, exception.limit
        case RequestError():
            status, code, param = exception.status, exception.code, exception.param
            kind = _KINDS.get(status, "invalid_request")
            headers.update(exception.headers)
            if not exception.retry:
                headers["x-should-retry"] = "false"
        case EngineError():
            status = exception.status if exception.status < 500 or exception.status == 503 else 502
            kind = _KINDS.get(status, "invalid_request" if status < 500 else "engine")
            if exception.retry_after_s is not None:
                headers["retry-after"] = str(math.ceil(exception.retry_after_s))
        case StenographError():
            status, kind = 500, "internal"
        case _:
            status, kind, message = 500, "internal", f"{type(exception).__name__}: {exception}"
    message = message.encode(errors="backslashreplace").decode()  # it may quote bytes that are no text
    return Failure(status, kind, message, code, param, headers, overflow)


_KINDS: dict[int, Kind] = {
    401: "authentication",
    403: "permission",
    404: "not_found",
    413: "too_large",
    429: "rate_limit",
    503: "overloaded",
}
