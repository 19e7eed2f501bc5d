"""Finds the recorded turn that a request goes on from: equal messages first, then those that differ in known ways only.

Equal digests lead the whole way down at a look-up a message. Where one is missing, the recorded messages that stand in
its place are compared with it, and a difference that was accepted once is known from then on by its digest. A request
that begins as an earlier one did goes on from where that one led.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from operator import is_, itemgetter

from stenograph.traces.digests import conversation_labels
from stenograph.traces.equivalences import NAMES, accept, ids_changed, minted_turns, reply_split, results_reordered
from stenograph.traces.trace import ToldNode, TraceTree
from stenograph.types import Conversation, Message

_MOST_COMPARED = 1024  # messages in one place: those that were recorded last, and those that an id names
_MOST_KNOWN = 65_536  # differences
_MOST_RECENT = 16  # requests, of as many conversations at the same time
_MOST_PLACES = 64  # beside a way that led nowhere


@dataclass(frozen=True, slots=True)
class Match:
    """The deepest turn whose conversation and reply are the first `num_known` messages asked, and not all of them.

    `asked` is what was asked with those messages as they are recorded; `accepted` names the differences.
    """

    turn: str
    num_known: int
    asked: Conversation
    accepted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is looked for: all messages but the last, which is to be answered; the first label is of the tools.

    `last_reply` is how many labels there are up to the last message of an assistant; nothing further down is a reply.
    """

    messages: tuple[Message, ...]
    labels: tuple[bytes, ...]
    last_reply: int

    @staticmethod
    def of(conversation: Conversation) -> _Asked:
        messages = conversation.messages
        replies = (i + 2 for i in range(len(messages) - 2, -1, -1) if messages[i].role == "assistant")
        return _Asked(messages, conversation_labels(conversation)[: len(messages)], next(replies, 0))

    def with_earlier(self, index: int, to: int) -> _Asked:
        """The result at `index` moved to the place `to`, before it."""
        messages, labels = list(self.messages), list(self.labels)
        messages.insert(to, messages.pop(index))
        labels.insert(to + 1, labels.pop(index + 1))
        return _Asked(tuple(messages), tuple(labels), self.last_reply)

    def with_joined(self, index: int, reply: Message) -> _Asked:
        """`reply` in the place of the message at `index` and of the next one."""
        messages = (*self.messages[:index], reply, *self.messages[index + 2 :])
        return _Asked(messages, (*self.labels[: index + 1], *self.labels[index + 2 :]), self.last_reply - 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """Another message came for the one `recorded` at `index`; `names` say why that is accepted, `before` what else."""

    index: int
    recorded: Message
    names: tuple[str, ...]
    before: _Change | None


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in what was told, `depth` labels down, and the differences on the way there."""

    node: ToldNode
    depth: int
    asked: _Asked
    changes: _Change | None = None

    @property
    def num_left(self) -> int:
        """Labels further down; ways that differ in how deep they are compare by it, where some have joined messages."""
        return len(self.asked.labels) - self.depth

    @property
    def is_last_reply(self) -> bool:
        return self.depth == self.asked.last_reply


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Where a request led: the next one of its conversation begins with the same messages."""

    tools: bytes
    messages: tuple[Message, ...]
    node: ToldNode
    changes: _Change | None

    def begins(self, asked: _Asked) -> bool:
        """Whether `asked` begins with the very objects: a request that repeats them has them from its bytes."""
        enough = len(asked.messages) > len(self.messages) and self.tools == asked.labels[0]
        return enough and all(map(is_, self.messages, asked.messages))


@dataclass(slots=True)
class Matcher:
    """Matches the requests of one session. `allowed` names the differences that are accepted.

    `_known` are differences met before: by the digest that came, the recorded ones, each with the differences' names.
    """

    allowed: Collection[str] = NAMES
    _known: dict[bytes, dict[bytes, tuple[str, ...]]] = field(default_factory=dict)
    _recent: list[_Found] = field(default_factory=list)

    def match(self, tree: TraceTree, conversation: Conversation) -> Match | None:
        asked = _Asked.of(conversation)
        best = self._go_on(tree, asked) or self._search(tree, _Place(tree.told.root, 0, asked))
        if best is None:
            return None
        num_known = best.depth - 1
        turn = _meant(best.node.value, best.asked.messages[num_known - 1])
        if best.asked is asked:
            self._recent.append(_Found(asked.labels[0], asked.messages[:num_known], best.node, best.changes))
            del self._recent[:-_MOST_RECENT]
        changes = list(_all(best.changes))
        if not changes:
            return Match(turn, num_known, conversation, ())
        accepted = tuple(sorted({name for change in changes for name in change.names}))
        return Match(turn, num_known, _as_recorded(conversation, best, changes), accepted)

    def _go_on(self, tree: TraceTree, asked: _Asked) -> _Place | None:
        """The last reply's place, reached from where an earlier request of the same conversation led."""
        begun = next((found for found in reversed(self._recent) if found.begins(asked)), None)
        if begun is None:
            return None
        self._recent.remove(begun)  # what is found now takes its place
        best = self._search(tree, _Place(begun.node, len(begun.messages) + 1, asked, begun.changes))
        return best if best is not None and best.is_last_reply else None

    def _search(self, tree: TraceTree, start: _Place) -> _Place | None:
        """The deepest place where a recorded reply ends what was asked so far.

        Where it is not the last reply, what stands beside the equal messages is tried too: an equal one may have led
        to nothing.
        """
        best: _Place | None = None
        ways = [start] if start.asked.last_reply else []
        beside: list[_Place] = []
        num_left = _MOST_PLACES
        while ways and not (best is not None and best.is_last_reply):
            way = ways.pop()
            end, valued = _follow(way)
            if valued is not None and (best is None or valued.num_left < best.num_left):
                best = valued
            if 0 < end.depth < end.asked.last_reply:
                ways += self._turn_offs(tree, end)
            if end.depth > 0:
                beside += (passed := list(islice(_passed(way, end), num_left)))
                num_left -= len(passed)
            while beside and not ways:
                ways += self._turn_offs(tree, beside.pop())
        return best

    def _turn_offs(self, tree: TraceTree, at: _Place) -> list[_Place]:
        """Ways on over messages that are not equal, the likeliest last: ids name it, it differs least, it is new."""
        index, label = at.depth - 1, at.asked.labels[at.depth]
        named = _named(at.asked.messages, index)
        ways: list[tuple[bool, int, _Place]] = []
        for node in self._compared(tree, at.node, named):
            turn = tree.first_below(node)
            recorded = tree.message(turn, index)
            asked, names = at.asked, self._known.get(label, {}).get(node.label)
            if node.label != label and names is None:
                asked, names = self._compare(tree, turn, recorded, at.asked, index)
            if names is not None:
                way = _Place(node, at.depth + 1, asked, _Change(index, recorded, names, at.changes))
                ways.append((turn in named, -len(names), way))
                if asked is at.asked:
                    self._know(label, node.label, names)
        return [way for *_, way in sorted(ways, key=itemgetter(0, 1))]

    def _know(self, label: bytes, recorded: bytes, names: tuple[str, ...]) -> None:
        if len(self._known) >= _MOST_KNOWN:  # of a client that changes all that it sends again and again
            self._known.clear()
        self._known.setdefault(label, {})[recorded] = names

    @staticmethod
    def _compared(tree: TraceTree, at: ToldNode, named: Collection[str]) -> list[ToldNode]:
        nodes = list(at.children)
        if len(nodes) <= _MOST_COMPARED:
            return nodes
        meant = [node for node in nodes[:-_MOST_COMPARED] if named and tree.first_below(node) in named]
        return meant + nodes[-_MOST_COMPARED:]

    def _compare(
        self, tree: TraceTree, turn: str, recorded: Message, asked: _Asked, index: int
    ) -> tuple[_Asked, tuple[str, ...] | None]:
        """By which names the message at `index` is `recorded`; of parallel results, the one that answers its call."""
        came = asked.messages[index]
        if recorded.role != "tool" or came.role != "tool":
            names = accept(recorded, came, self.allowed)
            return (asked, names) if names is not None else self._compare_joined(recorded, asked, index)
        ids = _ids_by_theirs(tree, turn, asked.messages, index)
        answered = [ids.get(one.tool_call_id or "", one.tool_call_id) for one in _run(asked.messages, index)]
        at = results_reordered(answered, recorded.tool_call_id) or 0
        if at > 0 and results_reordered.__name__ not in self.allowed:
            return asked, None
        if answered[at] != recorded.tool_call_id and answered[at] in ids.values():
            return asked, None  # it answers another call
        result = asked.messages[index + at]
        renamed = answered[at] != result.tool_call_id
        if renamed and ids_changed.__name__ not in self.allowed:
            return asked, None
        names = accept(recorded, replace(result, tool_call_id=answered[at]), self.allowed)
        if names is None:
            return asked, None
        names += (ids_changed.__name__,) if renamed else ()
        return (asked.with_earlier(index + at, index), (*names, results_reordered.__name__)) if at else (asked, names)

    def _compare_joined(self, recorded: Message, asked: _Asked, index: int) -> tuple[_Asked, tuple[str, ...] | None]:
        """By which names the message at `index` and the next one are `recorded`; the last message is no reply."""
        if reply_split.__name__ not in self.allowed or index + 2 >= len(asked.messages):
            return asked, None
        reply = reply_split(*asked.messages[index : index + 2])
        names = accept(recorded, reply, self.allowed) if reply is not None else None
        if reply is None or names is None:
            return asked, None
        return asked.with_joined(index, reply), (*names, reply_split.__name__)


def _follow(way: _Place) -> tuple[_Place, _Place | None]:
    """As far down as messages are equal, and the deepest place on the way that ends a reply."""
    node, depth, labels = way.node, way.depth, way.asked.labels
    valued, valued_depth = (node, depth) if node.has_value else (None, 0)
    while depth < len(labels):
        child = node.child(labels[depth])
        if child is None:
            break
        node, depth = child, depth + 1
        if node.has_value:
            valued, valued_depth = node, depth
    end = _Place(node, depth, way.asked, way.changes)
    return end, _Place(valued, valued_depth, way.asked, way.changes) if valued is not None else None


def _passed(way: _Place, end: _Place) -> Iterator[_Place]:
    """Places between the two where another message than the equal one stands too, but for the tools."""
    node, labels = way.node, way.asked.labels
    for depth in range(way.depth, end.depth):
        if depth > 0 and len(node.children) > 1:
            yield _Place(node, depth, way.asked, way.changes)
        child = node.child(labels[depth])
        assert child is not None
        node = child


def _run(messages: tuple[Message, ...], index: int) -> Iterator[Message]:
    """The results in a row from `index` on, but for a last one that is to be answered."""
    return takewhile(lambda message: message.role == "tool", islice(messages, index, len(messages) - 1))


def _ids_by_theirs(tree: TraceTree, turn: str, messages: tuple[Message, ...], index: int) -> dict[str, str]:
    """The recorded ids of the calls before `index`, by the ids that they came with."""
    at = next((i for i in range(index - 1, -1, -1) if messages[i].role == "assistant"), None)
    if at is None:
        return {}
    pairs = zip(messages[at].tool_calls, tree.message(turn, at).tool_calls, strict=False)
    return {theirs.id: ours.id for theirs, ours in pairs if theirs.id}


def _all(change: _Change | None) -> Iterator[_Change]:
    """The last difference and those before it."""
    while change is not None:
        yield change
        change = change.before


def _named(messages: tuple[Message, ...], index: int) -> set[str]:
    """The turns that ids name in the message at `index`, or in the rest of the reply that it begins."""
    came = messages[index : index + 2]
    reply = reply_split(*came) if len(came) == 2 else None
    return minted_turns(came[0]) | (minted_turns(reply) if reply is not None else set())


def _meant(equal: tuple[str, ...], reply: Message) -> str:
    """Of turns that said the same, the one that an id names; else the first choice of the last that were told."""
    named = minted_turns(reply)
    return next((turn for turn in equal if turn in named), equal[-1])


def _as_recorded(conversation: Conversation, best: _Place, changes: list[_Change]) -> Conversation:
    """The known messages as they are recorded; results of the last one's calls refer to them by the recorded ids."""
    messages, num_known = list(best.asked.messages), best.depth - 1
    theirs = messages[num_known - 1].tool_calls
    for change in changes:
        messages[change.index] = change.recorded
    ours = messages[num_known - 1].tool_calls
    ids = {call.id: recorded.id for call, recorded in zip(theirs, ours, strict=True) if call.id}
    unnamed = iter([recorded.id for call, recorded in zip(theirs, ours, strict=True) if not call.id])
    for index in range(num_known, len(messages)):
        if messages[index].role != "tool":
            break
        came = messages[index].tool_call_id or ""
        id = ids.get(came, came) or next(unnamed, None)  # without ids, it is the order that tells
        if id != messages[index].tool_call_id:
            messages[index] = replace(messages[index], tool_call_id=id)
    return replace(conversation, messages=tuple(messages))
