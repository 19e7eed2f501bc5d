"""Agents that do at random what agents do, and a book of what each turn was asked and answered."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from support.habits import HABITS, WHOLE_HABITS, Entry, History, reordered
from support.wires import Head, Item, Protocol, write

PLAIN = ("say", "say", "say", "parallel", "two", "overtake")
REAL = ("edit", "insert", "rewind", "retry", "truncate", "compact", "subagent")
CHANGES = (*PLAIN, *REAL, *HABITS, *WHOLE_HABITS)
HEADER = "x-something-header: cc_version=1.2.3.{}; entry=cli"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request on its way. `history` is sent; `kept` is what its agent remembers of it afterwards.

    `first` are the names by which it differs from what was said first, where it did not before: whatever was recorded
    differs by them. `cause` is that of the fork which it asks for on purpose. Of a stream, `left` bytes are read before
    its client goes away and asks the same again.
    """

    agent: Agent
    head: Head
    header: str
    history: History
    kept: History
    body: bytes
    first: frozenset[str] = frozenset()
    cause: str = ""
    streams: bool = False
    left: int | None = None

    @property
    def said(self) -> tuple[Item, ...]:
        return tuple(entry.said for entry in self.history)


@dataclass(frozen=True, slots=True)
class Told:
    """One turn as its agent knows it."""

    asked: Asked
    reply: Item


@dataclass(slots=True)
class Book:
    """What was told, by the name of the turn; by which names a message ever differed; words that are used once."""

    turns: dict[str, Told] = field(default_factory=dict)
    names: defaultdict[Item | Agent, set[str]] = field(default_factory=lambda: defaultdict(set))
    _numbers: Iterator[int] = field(default_factory=count)

    def word(self, kind: str) -> str:
        """A word of a kind: s(ystem), h(eader), u(ser), t(ool's result) or w(ritten by a model)."""
        return f"{kind}_{next(self._numbers):06x}"

    def continued(self, head: Head, said: tuple[Item, ...]) -> int:
        """How many of the messages are a recorded turn's and its reply, as they were said; 0 where they are none's."""
        for end in range(len(said) - 1, 0, -1):
            told = self.turns.get(said[end - 1].turn)
            if told and told.reply == said[end - 1] and told.asked.head == head and told.asked.said == said[: end - 1]:
                return end
        return 0

    def differences(self, asked: Asked) -> set[str]:
        """The names by which a request may differ from a record of it, whichever of its forms that is in."""
        # A protocol that carries arguments as objects loses their spelling.
        lost = {"arguments_respelled"} if asked.agent.protocol == "messages" else set()
        return lost.union({"header_changed"}, *(self.names[one] for one in (asked.agent, *asked.said)))


@dataclass(eq=False, slots=True)
class Agent:
    """A conversation in one protocol. `header` is how the system text begins now."""

    protocol: Protocol
    head: Head
    book: Book
    header: str
    history: History = ()
    last: Asked | None = None

    @staticmethod
    def new(protocol: Protocol, book: Book) -> Agent:
        header = HEADER.format("abc")
        head = Head((header, f"You are {book.word('s')}", "Be brief."), f"does {book.word('s')}")
        return Agent(protocol, head, book, header)

    def ask(self, change: str, chance: random.Random) -> list[Asked]:
        """Requests to be sent at the same time."""
        match change:
            case "parallel":
                return [self._say(self.history, chance)] * chance.randint(2, 4)
            case "two":
                return [self._say(self.history, chance), self._say(self.history, chance)]
            case "overtake" if self.last is not None:  # while the reply that it goes on from is asked for again
                return [self._say(self.history, chance), self.last, self.last]
            case "retry" if self.last is not None:
                return [self.last]
            case "subagent":
                return [self._subagent(chance)]
            case "results_reordered":
                return [self._say(self.history, chance, reorders=True)]
            case "header_changed":
                return [self._with_header(HEADER.format(self.book.word("h")), chance)]
            case _ if change in HABITS:
                return [self._with_habit(change, chance)]
        history, cause = self._rewritten(change, chance)
        return [replace(self._say(history, chance), cause=cause if history != self.history else "")]

    def adopt(self, asked: Asked, reply: Item) -> None:
        self.history = (*asked.kept, Entry(reply, reply))
        self.last = asked

    def _subagent(self, chance: random.Random) -> Asked:
        """The first request of another agent: one with other instructions, or with another tool alone."""
        other = Agent.new(self.protocol, self.book)
        cause = "system_changed"
        if self.last is not None and chance.random() < 0.5:
            other.head, other.header, cause = replace(self.head, tool=other.head.tool), self.header, "tools_changed"
        return replace(other._say((), chance), cause=cause)

    def _with_header(self, header: str, chance: random.Random) -> Asked:
        """A request with another header: from now on, or this time only."""
        before, self.header = self.header, header
        asked = self._say(self.history, chance)
        self.header = header if chance.random() < 0.5 else before
        return replace(asked, first=asked.first | {"header_changed"})

    def _with_habit(self, name: str, chance: random.Random) -> Asked:
        """A request whose client changes a reply: from now on, or this time only."""
        changed = HABITS[name](self.history, self.protocol, chance)
        asked = self._say(changed, chance)
        has_ids = all(call.id for entry in changed for call in entry.sent.calls)
        if not changed or not has_ids or chance.random() < 0.5:  # no client finds ids again that it gave up
            return asked
        new = [self._answering(self.history[-1], entry) for entry in asked.kept[len(changed) :]]
        return replace(asked, kept=(*self.history, *new))

    @staticmethod
    def _answering(reply: Entry, entry: Entry) -> Entry:
        """`entry`, where it is a result, with the id that its call is sent with."""
        ids = {said.id: sent.id for said, sent in zip(reply.said.calls, reply.sent.calls, strict=True)}
        answers = ids[entry.said.answers] if entry.said.role == "tool" else ""
        return replace(entry, sent=replace(entry.sent, answers=answers))

    def _rewritten(self, change: str, chance: random.Random) -> tuple[History, str]:
        """The history after a real change and the cause of the fork; as it is where there is nothing to change."""
        history = self.history
        questions = [i for i, entry in enumerate(history) if entry.said.role == "user"]
        replies = [i for i, entry in enumerate(history) if entry.said.role == "assistant"]
        match change:
            case "edit" if history:
                i = chance.randrange(len(history))
                edited, cause = self._edited(history[i], chance)
                return (*history[:i], edited, *history[i + 1 :]), cause
            case "insert" if questions:
                i = chance.choice(questions)
                return (*history[:i], self._user(chance), *history[i:]), "message_inserted"
            case "rewind" if replies:
                return history[: chance.choice(replies) + 1], ""
            case "truncate" if questions:
                return history[chance.choice(questions) :], "history_truncated"
            case "compact" if history:
                summary = "".join(history[-1].said.texts)
                question = Item("user", (f"Go on from this summary: {summary} {self.book.word('u')}",))
                cause = "compaction" if len(summary) >= 32 else "message_changed"
                return (Entry(question, question),), cause
        return history, ""

    def _edited(self, entry: Entry, chance: random.Random) -> tuple[Entry, str]:
        """A message with another text, or with other arguments of a call."""
        word = self.book.word(entry.said.role[0].replace("a", "w"))
        fields: dict[str, Any] = {"texts": (f"{word} edited",)}
        if not entry.said.calls or chance.random() < 0.5:
            return replace(
                entry, said=replace(entry.said, **fields), sent=replace(entry.sent, **fields)
            ), "message_changed"
        arguments = json.dumps({"word": word})
        said, sent = (
            replace(item, calls=(replace(item.calls[0], arguments=arguments), *item.calls[1:]))
            for item in (entry.said, entry.sent)
        )
        return replace(entry, said=said, sent=sent), "arguments_changed"

    def _say(self, history: History, chance: random.Random, reorders: bool = False) -> Asked:
        """What comes next: results for what was called, or a question."""
        new: list[Entry] = []
        last = history[-1] if history else None
        if last is not None and last.said.role == "assistant":
            for call in last.said.calls:
                result = Item("tool", (f"{self.book.word('t')} result",), answers=call.id)
                new.append(self._answering(last, Entry(result, result)))
        if last is None or (last.said.role == "assistant" and (not new or chance.random() < 0.15)):
            new.append(self._user(chance))
        kept = (*history, *new)
        sent = tuple(reordered(kept, chance)) if reorders else kept
        used: dict[Item | Agent, set[str]] = {entry.said: set(entry.names) for entry in kept}
        used[self] = {"results_reordered"} if sent != kept else set()
        first = {name for one, names in used.items() for name in names - self.book.names[one]}
        for one, names in used.items():
            self.book.names[one] |= names
        streams = chance.random() < 0.4
        return Asked(
            self,
            self.head,
            self.header,
            kept,
            kept,
            self._body(sent, streams, chance),
            frozenset(first),
            streams=streams,
            left=chance.randrange(2000) if streams and chance.random() < 0.3 else None,
        )

    def _user(self, chance: random.Random) -> Entry:
        question = self.book.word("u")
        item = Item("user", chance.choice([(question,), (f"{question} asks\nmore",), ("a reminder\n", question)]))
        return Entry(item, item)

    def _body(self, sent: History, streams: bool, chance: random.Random) -> bytes:
        head = replace(self.head, lines=(self.header, *self.head.lines[1:]))
        items = [entry.sent for entry in sent]
        body = write(self.protocol, head, items, chance)
        if self.protocol == "responses" and chance.random() < 0.3:
            known = self.book.continued(self.head, tuple(entry.said for entry in sent))
            if known and all(entry.sent == entry.said for entry in sent):
                body = write(self.protocol, head, items[known:], chance)
                body["previous_response_id"] = f"resp_{items[known - 1].turn}"
        if chance.random() < 0.1:
            limit = {"chat": "max_completion_tokens", "messages": "max_tokens", "responses": "max_output_tokens"}
            body[limit[self.protocol]] = chance.randrange(1, 60)
        return json.dumps({"model": "any", "stream": streams, **body}).encode()
