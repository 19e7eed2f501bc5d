"""Agents that do at random what agents do, and a book of what each turn was asked and answered."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from support.habits import HABITS, WHOLE_HABITS, Entry, History, reordered
from support.wires import Head, Item, Protocol, write

PLAIN = ("say", "say", "say", "parallel", "two", "overtake")
REAL = ("edit", "insert", "rewind", "retry", "truncate", "compact", "subagent")
CHANGES = (*PLAIN, *REAL, *HABITS, *WHOLE_HABITS)
HEADER = "x-something-header: cc_version=1.2.3.{}; entry=cli"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request on its way. `history` is sent; `kept` is what its agent remembers of it afterwards.

    `used` are the names by which it differs from what was said first; those in `first` were not used before where they
    are used now, so that whatever was recorded differs by them.
    """

    agent: Agent
    head: Head
    history: History
    kept: History
    body: bytes
    used: frozenset[str] = frozenset()
    first: frozenset[str] = frozenset()

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
        """A word of a kind: s(ystem), u(ser) or t(ool's result)."""
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
        return lost.union(*(self.names[one] for one in (asked.agent, *asked.said)))


@dataclass(eq=False, slots=True)
class Agent:
    """A conversation in one protocol."""

    protocol: Protocol
    head: Head
    book: Book
    history: History = ()
    last: Asked | None = None

    @staticmethod
    def new(protocol: Protocol, book: Book) -> Agent:
        header = HEADER.format("abc")
        return Agent(protocol, Head((header, f"You are {book.word('s')}", "Be brief."), f"does {book.word('s')}"), book)

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
                return Agent.new(self.protocol, self.book).ask("say", chance)
            case "results_reordered" | "header_changed":
                return [self._say(self.history, chance, change)]
            case _ if change in HABITS:
                return [self._with_habit(change, chance)]
        return [self._say(self._rewritten(change, chance), chance)]

    def adopt(self, asked: Asked, reply: Item) -> None:
        self.history = (*asked.kept, Entry(reply, reply))
        self.last = asked

    def _with_habit(self, name: str, chance: random.Random) -> Asked:
        """A request whose client changes a reply: from now on, or this time only."""
        changed = HABITS[name](self.history, self.protocol, chance)
        asked = self._say(changed, chance)
        if name == "ids_changed" or chance.random() < 0.5:  # no client finds ids again that it gave up
            return asked
        return replace(asked, kept=(*self.history, *asked.kept[len(changed) :]))

    def _rewritten(self, change: str, chance: random.Random) -> History:
        """The history after a real change; as it is where there is nothing to change."""
        history = self.history
        questions = [i for i, entry in enumerate(history) if entry.said.role == "user"]
        replies = [i for i, entry in enumerate(history) if entry.said.role == "assistant"]
        match change:
            case "edit" if history:
                i = chance.randrange(len(history))
                kind = history[i].said.role[0].replace("a", "w")
                edited = replace(history[i].said, texts=(f"{self.book.word(kind)} edited",))
                return (*history[:i], Entry(edited, edited), *history[i + 1 :])
            case "insert" if questions:
                i = chance.choice(questions)
                return (*history[:i], self._user(chance), *history[i:])
            case "rewind" if replies:
                return history[: chance.choice(replies) + 1]
            case "truncate" if questions:
                return history[chance.choice(questions) :]
            case "compact":
                return ()
        return history

    def _say(self, history: History, chance: random.Random, whole: str = "") -> Asked:
        """What comes next: results for what was called, or a question."""
        new: list[Entry] = []
        last = history[-1] if history else None
        if last is not None and last.said.role == "assistant":
            for said, sent in zip(last.said.calls, last.sent.calls, strict=True):
                result = Item("tool", (f"{self.book.word('t')} result",), answers=said.id)
                new.append(Entry(result, replace(result, answers=sent.id)))
        if not new or chance.random() < 0.15:
            new.append(self._user(chance))
        kept = (*history, *new)
        sent = tuple(reordered(kept, chance)) if whole == "results_reordered" else kept
        head = self.head
        if whole == "header_changed" and history:
            header = HEADER.format(f"{chance.getrandbits(12):03x}")
            head = replace(head, lines=(header, *head.lines[1:]))
        used: dict[Item | Agent, set[str]] = {entry.said: set(entry.names) for entry in kept}
        used[self] = {"results_reordered"} if sent != kept else set()
        used[self] |= {"header_changed"} if head != self.head else set()
        first = {name for one, names in used.items() for name in names - self.book.names[one]}
        for one, names in used.items():
            self.book.names[one] |= names
        everything = frozenset().union(*used.values())
        return Asked(self, self.head, kept, kept, self._body(head, sent, chance), everything, frozenset(first))

    def _user(self, chance: random.Random) -> Entry:
        question = self.book.word("u")
        item = Item("user", chance.choice([(question,), (f"{question} asks\nmore",), ("a reminder\n", question)]))
        return Entry(item, item)

    def _body(self, head: Head, sent: History, chance: random.Random) -> bytes:
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
        return json.dumps({"model": "any", **body}).encode()
