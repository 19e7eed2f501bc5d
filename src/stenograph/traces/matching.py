"""Finds the recorded turn that a request goes on from: equal messages first, then those that differ in known ways only.

Equal digests lead the whole way down at a look-up a message. Where one is missing, the recorded messages that stand in
its place are compared with it, and a difference that was accepted once is known from then on by its digest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

from stenograph.traces.digests import conversation_labels
from stenograph.traces.equivalences import NAMES, accept, ids_changed, minted_turns, results_reordered
from stenograph.traces.trace import TraceTree
from stenograph.traces.tree import Node
from stenograph.types import Conversation, Message

_MOST_COMPARED = 1024  # messages in one place: those that were recorded last, and those that an id names
_MOST_KNOWN = 65_536  # differences
_MOST_PLACES = 64  # beside a way that led nowhere

ToldNode = Node[bytes, tuple[str, ...]]


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
    """What is looked for: all messages but the last, which is to be answered; the first label is of the tools."""

    messages: tuple[Message, ...]
    labels: list[bytes]

    def with_earlier(self, index: int, to: int) -> _Asked:
        """The message at `index` moved to the place `to`, before it."""
        messages, labels = list(self.messages), list(self.labels)
        messages.insert(to, messages.pop(index))
        labels.insert(to + 1, labels.pop(index + 1))
        return _Asked(tuple(messages), labels)


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in what was told, `depth` labels down, reached by equal messages from `before` or by a difference.

    Then `recorded` is the message that stands where another came, and `names` say why that is accepted.
    """

    node: ToldNode
    depth: int
    asked: _Asked
    before: _Place | None = None
    recorded: Message | None = None
    names: tuple[str, ...] = ()


@dataclass(slots=True)
class Matcher:
    """Matches the requests of one session. `allowed` names the differences that are accepted.

    `_known` are differences met before: by the digest that came, the recorded ones, each with the differences' names.
    """

    allowed: Collection[str] = NAMES
    _known: dict[bytes, dict[bytes, tuple[str, ...]]] = field(default_factory=dict)

    def match(self, tree: TraceTree, conversation: Conversation) -> Match | None:
        messages = conversation.messages
        asked = _Asked(messages, conversation_labels(conversation)[: len(messages)])
        best: _Place | None = None
        for valued in self._replies(tree, asked):
            if best is None or valued.depth > best.depth:
                best = valued
        if best is None:
            return None
        num_known = best.depth - 1
        turn = _meant(best.node.value, best.asked.messages[num_known - 1])
        changed = list(_changed(best))
        if not changed:
            return Match(turn, num_known, conversation, ())
        accepted = tuple(sorted({name for place in changed for name in place.names}))
        return Match(turn, num_known, _as_recorded(conversation, best, changed), accepted)

    def _replies(self, tree: TraceTree, asked: _Asked) -> Iterator[_Place]:
        """Places where a recorded reply ends what was asked so far, until it is the last reply.

        Where it is not, what stands beside the equal messages is tried too: an equal one may have led to nothing.
        """
        replies = (i + 2 for i in range(len(asked.labels) - 2, -1, -1) if asked.messages[i].role == "assistant")
        last_reply = next(replies, 0)  # its depth
        ways = [_Place(tree.told.root, 0, asked)] if last_reply else []
        beside: list[_Place] = []
        num_left = _MOST_PLACES
        while ways:
            way = ways.pop()
            end, valued = _follow(way)
            if valued is not None:
                yield valued
                if valued.depth == last_reply:
                    return
            if 0 < end.depth < last_reply:
                ways += self._turn_offs(tree, end)
            if end.depth > 0:
                beside += (passed := list(islice(_passed(way, end), num_left)))
                num_left -= len(passed)
            while beside and not ways:
                ways += self._turn_offs(tree, beside.pop())

    def _turn_offs(self, tree: TraceTree, at: _Place) -> list[_Place]:
        """Ways on over messages that are not equal, the likeliest last."""
        index, label = at.depth - 1, at.asked.labels[at.depth]
        named = minted_turns(at.asked.messages[index])
        ways, likeliest = [], []
        for node in self._compared(tree, at.node, named):
            turn = tree.first_below(node)
            recorded = tree.message(turn, index)
            asked, names = at.asked, self._known.get(label, {}).get(node.label)
            if node.label != label and names is None:
                asked, names = self._compare(tree, turn, recorded, at.asked, index)
            if names is not None:
                way = _Place(node, at.depth + 1, asked, at, recorded, names)
                (likeliest if turn in named else ways).append(way)
                if asked is at.asked:
                    self._know(label, node.label, names)
        return ways + likeliest

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
            return asked, accept(recorded, came, self.allowed)
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
    end = _Place(node, depth, way.asked, way)
    return end, _Place(valued, valued_depth, way.asked, way) if valued is not None else None


def _passed(way: _Place, end: _Place) -> Iterator[_Place]:
    """Places between the two where another message than the equal one stands too, but for the tools."""
    node, labels = way.node, way.asked.labels
    for depth in range(way.depth, end.depth):
        if depth > 0 and len(node.children) > 1:
            yield _Place(node, depth, way.asked, way)
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


def _changed(place: _Place | None) -> Iterator[_Place]:
    """The differences on the way to `place`."""
    while place is not None:
        if place.recorded is not None:
            yield place
        place = place.before


def _meant(equal: tuple[str, ...], reply: Message) -> str:
    """Of turns that said the same, the one that an id names; else the first choice of the last that were told."""
    named = minted_turns(reply)
    return next((turn for turn in equal if turn in named), equal[-1])


def _as_recorded(conversation: Conversation, best: _Place, changed: list[_Place]) -> Conversation:
    """The known messages as they are recorded; results of the last one's calls refer to them by the recorded ids."""
    messages, num_known = list(best.asked.messages), best.depth - 1
    theirs = messages[num_known - 1].tool_calls
    for place in changed:
        assert place.recorded is not None
        messages[place.depth - 2] = place.recorded
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
