"""gpt-oss's format, Harmony: a turn is a chain of messages, and what each is stands in its header."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stenograph.rendering.detokenize import Detokenizer
from stenograph.rendering.stream import Grammar, MarkerStream, State
from stenograph.types import Ids, Reply

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHANNELS = {"analysis": State.REASONING, "final": State.CONTENT, "commentary": State.CONTENT}


@dataclass(frozen=True, slots=True)
class Harmony:
    """The tokens that frame messages, and how a header's ids read as text."""

    start: int
    message: int
    end: int
    channel: int
    stop: tuple[int, ...]
    decode: Callable[[list[int]], str]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, stop: tuple[int, ...]) -> Harmony:
        names = ("<|start|>", "<|message|>", "<|end|>", "<|channel|>")
        start, message, end, channel = (tokenizer.encode(name, add_special_tokens=False)[0] for name in names)
        return cls(start, message, end, channel, stop, lambda ids: str(tokenizer.decode(ids)))

    def opened(self, header: Sequence[int]) -> State:
        """What the message after `header` is."""
        ids = list(header)
        recipient = re.search(r"to=([^\s<]+)", self.decode(ids))
        if recipient is not None and recipient[1].startswith("functions."):
            return State.HELD
        if self.channel not in ids:
            return State.BETWEEN
        words = self.decode(ids[ids.index(self.channel) + 1 :]).split()
        return _CHANNELS.get(words[0], State.BETWEEN) if words else State.BETWEEN

    def begins(self, prompt: list[int]) -> State:
        """What a turn after `prompt` begins in the middle of; START where it has to write a header first."""
        if self.start not in prompt:
            return State.START
        last = prompt[len(prompt) - prompt[::-1].index(self.start) :]
        return self.opened(last[: last.index(self.message)]) if self.message in last else State.START

    def grammar(self) -> Grammar:
        held = dict.fromkeys(self.stop, State.HELD)
        framing = held | {self.start: State.BETWEEN, self.end: State.BETWEEN}
        states = dict.fromkeys((State.REASONING, State.CONTENT, State.BETWEEN), framing)
        return Grammar(states | {State.START: held | {self.start: State.BETWEEN}}, header=-1, bare_text=False)


class HarmonyStream(MarkerStream):
    """Shows the text of the channels that have a meaning here; what is between messages is nothing."""

    def __init__(
        self, detokenizer: Detokenizer, harmony: Harmony, prompt: list[int], parse: Callable[[Ids], Reply]
    ) -> None:
        super().__init__(detokenizer, harmony.grammar(), False, parse)
        self._harmony = harmony
        self._header: list[int] | None = None
        self.state = harmony.begins(prompt)

    @property
    def _in_text(self) -> bool:
        return self._header is None and super()._in_text

    def _read(self, token: int) -> None:
        if self._header is None:
            super()._read(token)
            self._header = [] if token == self._harmony.start else None
        elif token in self._harmony.stop:
            self.state = State.HELD
        elif token == self._harmony.message:
            self.state, self._header = self._harmony.opened(self._header), None
        else:
            self._header.append(token)

    def _read_text(self, token: int) -> None:
        if self.state is not State.BETWEEN:
            super()._read_text(token)
