"""Incremental reading of sampled ids: whatever was shown is a prefix of what the whole turn parses to."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from stenograph.rendering.base import Delta
from stenograph.rendering.detokenize import Detokenizer, TokenText, Trimmed
from stenograph.rendering.response import Reading
from stenograph.types import Ids, Reply


class BufferedStream:
    """Shows nothing before the end: for formats whose text cannot be told from markup while it arrives."""

    def __init__(self, parse: Callable[[Ids], Reply]) -> None:
        self._parse = parse
        self._ids: list[Ids] = []

    def feed(self, ids: Ids) -> Delta:
        self._ids.append(ids)
        return Delta()

    def finish(self) -> Delta:
        reply = self._parse(np.concatenate(self._ids) if self._ids else np.zeros(0, np.int32))
        return Delta(reply.content, reply.reasoning)


@dataclass(frozen=True, slots=True)
class Markers:
    """The tokens that structure a turn: reasoning first, then content, then calls."""

    stop: Collection[int]
    turn_start: int
    reasoning_start: int
    reasoning_end: int
    call_start: int
    reasoning_end_text: str = "</think>"


class _State(Enum):
    START = auto()  # nothing but white space so far: reasoning may still open
    REASONING = auto()
    CONTENT = auto()
    HELD = auto()  # what this is, only the whole turn tells


class MarkerStream:
    """For formats with a token per marker: text leaves at once, a call and all after it when the turn is whole."""

    def __init__(
        self, detokenizer: Detokenizer, markers: Markers, in_reasoning: bool, parse: Callable[[Ids], Reply]
    ) -> None:
        self._markers = markers
        self._parse = parse
        self._state = _State.REASONING if in_reasoning else _State.START
        self._ids: list[Ids] = []
        self._first = True
        self._text = TokenText(detokenizer)
        self._spelled: list[str] = []  # the reasoning, to look for markers spelled in it
        self._content, self._reasoning = Trimmed(), Trimmed()

    def feed(self, ids: Ids) -> Delta:
        self._ids.append(ids)
        content: list[str] = []
        reasoning: list[str] = []
        for token in ids.tolist():
            if self._state is not _State.HELD and (
                token in self._markers.stop
                or token == self._markers.call_start
                or (self._first and token == self._markers.turn_start)
            ):
                self._state = _State.HELD
            if self._state is _State.HELD:
                break
            self._first = False
            if self._state is _State.REASONING:
                reasoning.append(self._read_reasoning(token))
            else:
                content.append(self._read_content(token))
        return Delta("".join(content), "".join(reasoning))

    def finish(self) -> Delta:
        reply = self._parse(np.concatenate(self._ids) if self._ids else np.zeros(0, np.int32))
        return Delta(reply.content[self._content.num_shown :], reply.reasoning[self._reasoning.num_shown :])

    def _read_content(self, token: int) -> str:
        if self._state is _State.START and token == self._markers.reasoning_start:
            shown = self._content.push(self._text.flush())
            if not shown:
                self._state = _State.REASONING
                return ""
            self._state = _State.CONTENT
            return shown + self._content.push(self._text.push(token))
        shown = self._content.push(self._text.push(token))
        if shown:
            self._state = _State.CONTENT
        return shown

    def _read_reasoning(self, token: int) -> str:
        if token == self._markers.reasoning_start:
            return ""
        ends = token == self._markers.reasoning_end
        text = self._text.flush() if ends else self._text.push(token)
        self._spelled.append(text)
        if ends:
            # Some parsers split at the first marker in the text; one that was spelled in letters comes before this one.
            spelled = self._markers.reasoning_end_text in "".join(self._spelled)
            self._state = _State.HELD if spelled else _State.CONTENT
        return self._reasoning.push(text)


class TextStream:
    """For formats with markers in the text: the reader holds back what may still become one."""

    def __init__(self, detokenizer: Detokenizer, stop: Collection[int], reading: Reading) -> None:
        self._text = TokenText(detokenizer)
        self._stop = stop
        self._reading = reading
        self._ended = False

    def feed(self, ids: Ids) -> Delta:
        pieces: list[str] = []
        for token in ids.tolist():
            self._ended = self._ended or token in self._stop
            if self._ended:
                break
            pieces.append(self._text.push(token))
        return self._reading.feed("".join(pieces))

    def finish(self) -> Delta:
        shown = self._reading.feed(self._text.flush())
        rest = self._reading.finish()
        return Delta(shown.content + rest.content, shown.reasoning + rest.reasoning)
