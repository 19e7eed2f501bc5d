"""The life of a call: received -> prepared -> generating -> committed -> delivered | undelivered, or failed.

Its generation is its session's task and outlives its client. What the task shows and how it ends is kept here, so that
whoever listens, the first client or one that asks the same again, hears it from the beginning.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum, auto

from stenograph.dialects.base import Answered, Request
from stenograph.dialects.minted import choice_names
from stenograph.rendering.base import Delta
from stenograph.traces.payloads import Holder


class State(StrEnum):
    RECEIVED = auto()
    PREPARED = auto()  # the prompt's ids are known
    GENERATING = auto()
    COMMITTED = auto()
    DELIVERED = auto()
    UNDELIVERED = auto()  # committed, and its client gone; a repeat may still have it
    FAILED = auto()  # nothing is recorded


_NEXT = {
    State.RECEIVED: {State.PREPARED, State.FAILED},
    State.PREPARED: {State.GENERATING, State.FAILED},
    State.GENERATING: {State.COMMITTED, State.FAILED},
    State.COMMITTED: {State.DELIVERED, State.UNDELIVERED},
    State.UNDELIVERED: {State.DELIVERED},
    State.DELIVERED: set(),
    State.FAILED: set(),
}


class Call:
    """One request's answer in the making. `key` is the same for requests that ask the same."""

    def __init__(self, request: Request, headers: Mapping[str, str], key: str, max_tokens: int) -> None:
        self.names = choice_names(secrets.token_hex(8), request.num_choices)  # of its turns; the first is its own
        self.holder = Holder("request", self.name)  # of what is heavy, until it is the session's
        self.request = request
        self.headers = headers
        self.key = key
        self.max_tokens = max_tokens  # what the request allows
        self.received_s = time.time()
        self.state = State.RECEIVED
        self.num_prompt = 0
        self.shown: list[tuple[int, Delta]] = []  # by choice
        self.answered: tuple[Answered, ...] = ()
        self.error: Exception | None = None
        self.has_client = False
        self.given_up = False
        self.task: asyncio.Task[None] | None = None  # its session's
        self._deadline: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def over(self) -> bool:
        """Whether nothing more will be shown."""
        return self.state not in (State.RECEIVED, State.PREPARED, State.GENERATING)

    def advance(self, state: State) -> None:
        """The one place where the state changes."""
        assert state in _NEXT[self.state], f"{self.state} -> {state}"
        self.state = state
        if self.over and self._deadline is not None:
            self._deadline.cancel()  # which would keep this call and all it holds until then
        self._news.set()

    def prepared(self, num_prompt: int, names: Sequence[str]) -> None:
        self.num_prompt, self.names = num_prompt, tuple(names)
        self.advance(State.PREPARED)

    def show(self, choice: int, delta: Delta) -> None:
        self.shown.append((choice, delta))
        self._news.set()

    def committed(self, answered: Sequence[Answered]) -> None:
        self.answered = tuple(answered)
        self.advance(State.COMMITTED)

    def failed(self, error: Exception) -> None:
        self.error = error
        self.advance(State.FAILED)

    def join(self) -> None:
        """A client listens, the first or one that asks the same."""
        self.has_client = True
        if self._deadline is not None:
            self._deadline.cancel()

    def leave(self, timeout_s: float) -> None:
        """Nobody listens; what is not over by then is given up after `timeout_s`."""
        self.has_client = False
        self._news.set()
        if not self.over:
            self._deadline = asyncio.get_running_loop().call_later(timeout_s, self._give_up)

    def _give_up(self) -> None:
        if self.task is not None and not self.over:
            self.given_up = True
            self.task.cancel()

    async def hear(self, position: float, timeout_s: float | None = None) -> bool:
        """Wait until more than `position` deltas are shown, or all is over; False where the time runs out first."""

        def is_heard() -> bool:
            return len(self.shown) > position or self.over

        if is_heard():
            return True
        try:
            async with asyncio.timeout(timeout_s):
                while not is_heard():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    async def heard_out(self) -> None:
        """Wait until it is known whether the client has what is committed."""
        while self.state is State.COMMITTED and self.has_client:
            self._news.clear()
            await self._news.wait()

    def answers(self, key: str, max_tokens: int) -> bool:
        """Whether this call, its client gone, answers a request too: the same, and no longer where that would count."""
        gone = self.given_up or self.state in (State.DELIVERED, State.FAILED)
        if self.has_client or gone or self.key != key:
            return False
        cut = not self.answered or any(one.turn.finish_reason == "length" for one in self.answered)
        return max_tokens <= self.max_tokens or not cut
