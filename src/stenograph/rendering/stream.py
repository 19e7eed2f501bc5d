"""Incremental reading of sampled ids: whatever was shown is a prefix of what the whole turn parses to."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping
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
        self._ids = array("i")
        self.reply = Reply()

    def feed(self, ids: Ids) -> Delta:
        self._ids.extend(ids.tolist())
        return Delta()

    def finish(self) -> Delta:
        self.reply = self._parse(np.array(self._ids, np.int32))
        return Delta(self.reply.content, self.reply.reasoning)


class State(Enum):
    """Where in a turn the tokens read so far end."""

    START = auto()  # nothing but white space: reasoning may still open
    REASONING = auto()
    CONTENT = auto()
    BETWEEN = auto()  # behind a part, in a format that marks each
    HELD = auto()  # what this is, only the whole turn tells
    RESCINDED = auto()  # held, and text: the family's parser would take back what was shown


@dataclass(frozen=True, slots=True)
class Grammar:
    """The markers of a turn as tokens, and where each leads from each state; what leads nowhere is text.

    `header`: a turn that begins with it brings the header that the prompt has. `starts`: text with which a turn may
    begin as something that only the whole of it tells; `spelled` may stand anywhere. `end`: the end marker of
    reasoning, for parsers that split at the first in the text, though it be in letters. `lead`, as text and as ids,
    begins reasoning that was opened in the turn, and is none. `after_space`: reasoning may open behind white space.
    `bare_text`: content needs no marker. `joins`: a second start of reasoning within it does not cut its text.
    `in_letters`: the tokenizer has no tokens for the markers of reasoning.
    """

    states: Mapping[State, Mapping[int, State]]
    header: int
    starts: tuple[str, ...] = ()
    spelled: tuple[str, ...] = ()
    end: str = ""
    lead: str = ""
    lead_ids: tuple[int, ...] = ()
    after_space: bool = True
    bare_text: bool = True
    joins: bool = True
    in_letters: bool = False


class MarkerStream:
    """For formats with a token per marker: text leaves at once, a call and all after it when the turn is whole."""

    def __init__(
        self, detokenizer: Detokenizer, grammar: Grammar, in_reasoning: bool, parse: Callable[[Ids], Reply]
    ) -> None:
        self._grammar = grammar
        self._parse = parse
        self._ids = array("i")
        self.reply = Reply()
        self._text = TokenText(detokenizer)
        self._content, self._reasoning = Trimmed(), Trimmed()
        self._new_content: list[str] = []
        self._new_reasoning: list[str] = []
        self._start = ""  # the turn's first text, while it may still be the start of something else
        self._pending = ""  # the end of the text, while it may still become a spelled marker
        self._letters = ""  # the end of the reasoning, while it may still become a spelled end marker
        self._spelled_end = False
        self._lead: tuple[str, tuple[int, ...]] | None = ("", ()) if grammar.lead else None
        self._opened = not in_reasoning  # whether reasoning, if any, is opened by the turn itself
        self.state = State.REASONING if in_reasoning else State.START
        if in_reasoning and grammar.in_letters:
            self.state = State.HELD
        self.num_read = 0  # tokens before the one from which on everything is held

    def feed(self, ids: Ids) -> Delta:
        tokens = ids.tolist()
        self._ids.extend(tokens)
        if self._in_text and self._grammar.states[self.state].keys().isdisjoint(tokens):
            self._read_run(tokens)
        else:
            for token in tokens:
                if self.state in _HOLDING:
                    break
                self._read(token)
                self.num_read += self.state not in _HOLDING
        delta = Delta("".join(self._new_content), "".join(self._new_reasoning))
        self._new_content.clear()
        self._new_reasoning.clear()
        return delta

    def finish(self) -> Delta:
        self.reply = self._parse(np.array(self._ids, np.int32))
        return Delta(self.reply.content[self._content.num_shown :], self.reply.reasoning[self._reasoning.num_shown :])

    @property
    def _in_text(self) -> bool:
        """Whether only a marker can make more of the next token than text."""
        if self.state is State.REASONING and self._lead is not None:
            return False
        return self.state in (State.REASONING, State.CONTENT) and self.num_read > 0

    def _read_run(self, tokens: list[int]) -> None:
        """Text, at once where no marker is spelled in it: what is held from there on is counted by token."""
        texts = [self._text.push(token) for token in tokens]
        whole = "".join(texts)
        if not any(marker in self._pending + whole for marker in self._grammar.spelled):
            self._show(whole)
            self.num_read += len(tokens)
            return
        for text in texts:
            if self.state not in _HOLDING:
                self._show(text)
                self.num_read += self.state not in _HOLDING

    def _read(self, token: int) -> None:
        grammar = self._grammar
        target = grammar.states[self.state].get(token)
        if self.num_read == 0:
            if token == grammar.header:
                target = State.HELD
            elif self.state is State.REASONING and grammar.states[State.START].get(token) is State.REASONING:
                self._opened = True  # anew, though the prompt has done so
                return
        if target is None:
            self._read_text(token)
        elif target in _HOLDING:
            self.state = target
        elif not (target is State.REASONING is self.state and grammar.joins):
            self._enter(token, target)

    def _enter(self, token: int, target: State) -> None:
        rest = self._text.flush()
        if self.state is State.START:
            self._start += rest
            if self._start.strip():  # then this is no start any more
                self.state = State.CONTENT
                self._show(self._start)
                self._read(token)
                return
        else:
            if self.state is State.REASONING and self._lead is not None:
                rest, self._lead = self._lead[0] + rest, None
            self._show(rest)
            self._push(self._pending)
            self._pending = ""
        if self.state not in _HOLDING:
            self.state = State.HELD if self._spelled_end and self.state is State.REASONING else target

    def _read_text(self, token: int) -> None:
        text = self._text.push(token)
        if self.state is State.START and self._grammar.bare_text:
            self._read_start(text)
        elif self.state in (State.START, State.BETWEEN):
            self.state = State.HELD
        elif self.state is State.REASONING and self._lead is not None:
            self._read_lead(self._lead[0] + text, (*self._lead[1], token))
        else:
            self._show(text)

    def _read_start(self, text: str) -> None:
        self._start = (self._start + text).lstrip()
        if any(self._start.startswith(start) for start in self._grammar.starts):
            self.state = State.HELD
        elif not self._grammar.after_space or (
            self._start and not any(start.startswith(self._start) for start in self._grammar.starts)
        ):
            self.state = State.CONTENT
            self._show(self._start)

    def _read_lead(self, text: str, ids: tuple[int, ...]) -> None:
        """Leave the lead of reasoning out; where it is there in part, or in other tokens, parsers differ on it."""
        lead = self._grammar.lead
        if self._opened and ids == self._grammar.lead_ids:
            self._lead = None
        elif text.startswith(lead):
            self.state = State.HELD
        elif lead.startswith(text):
            self._lead = text, ids
        else:
            self._lead = None
            self._show(text)

    def _show(self, text: str) -> None:
        if self.state is State.REASONING and self._grammar.end:
            self._letters += text
            self._spelled_end = self._spelled_end or self._grammar.end in self._letters
            self._letters = self._letters[-len(self._grammar.end) + 1 :]
        text = self._pending + text
        places = [place for marker in self._grammar.spelled if (place := text.find(marker)) >= 0]
        if places:
            self._push(text[: min(places)])
            self.state = State.HELD
            return
        num_pending = max((_overlap(text, marker) for marker in self._grammar.spelled), default=0)
        self._pending = text[len(text) - num_pending :]
        self._push(text[: len(text) - num_pending])

    def _push(self, text: str) -> None:
        if self.state is State.REASONING:
            self._new_reasoning.append(self._reasoning.push(text))
        else:
            self._new_content.append(self._content.push(text))


_HOLDING = (State.HELD, State.RESCINDED)


def _overlap(text: str, marker: str) -> int:
    """How much of the start of `marker` the end of `text` is."""
    longest = min(len(text), len(marker) - 1)
    if marker[0] not in text[len(text) - longest :]:  # as in nearly every text
        return 0
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


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

    @property
    def reply(self) -> Reply:
        return self._reading.reply
