"""Finds the recorded turn that a request goes on from: equal messages first, then those that differ in known ways only.

Equal digests lead the whole way down at a look-up a message. Where one is missing, the recorded messages that stand in
its place are compared with it, and a difference that was accepted once is known from then on by its digest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter

from stenograph.traces.digests import conversation_labels
from stenograph.traces.equivalences import NAMES, accept, minted_turns, results_reordered
from stenograph.traces.trace import TraceTree
from stenograph.traces.tree import Node
from stenograph.types import Conversation, Message

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


@dataclass(slots=True)
class Matcher:
    """Matches the requests of one session. `allowed` names the differences that are accepted.

    `_known` are differences met before: by the digest that came, the recorded ones, each with the differences' names.
    """

    allowed: Collection[str] = NAMES
    _known: dict[bytes, dict[bytes, tuple[str, ...]]] = field(default_factory=dict)

    def match(self, tree: TraceTree, conversation: Conversation) -> Match | None:
        messages = conversation.messages
        labels = conversation_labels(conversation)[: len(messages)]  # all but the last message
        best: _Place | None = None
        ways = [_Place(tree.told.root, 0)]
        while ways:
            end, valued = _follow(labels, ways.pop())
            if valued is not None and (best is None or valued.depth > best.depth):
                best = valued
            if 0 < end.depth < len(labels):
                ways += self._turn_offs(tree, end, labels, messages)
        if best is None:
            return None
        num_known = best.depth - 1
        changed = dict(_changed(best))
        accepted = tuple(sorted({name for _, names in changed.values() for name in names}))
        asked = _as_recorded(conversation, changed, num_known) if changed else conversation
        return Match(_meant(best.node.value, messages[num_known - 1]), num_known, asked, accepted)

    def _turn_offs(
        self, tree: TraceTree, at: _Place, labels: list[bytes], messages: tuple[Message, ...]
    ) -> list[_Place]:
        """Ways on from where no equal message stands, the likeliest last."""
        index, label = at.depth - 1, labels[at.depth]
        came, known = messages[index], self._known.get(label, {})
        found = []
        for node in at.node.children:
            turn = tree.first_below(node)
            recorded = tree.message(turn, index)
            names = known.get(node.label) or accept(recorded, came, self.allowed)
            if names is not None:
                self._known.setdefault(label, {})[node.label] = names
                way = _Place(node, at.depth + 1, at, (recorded,), names)
                found.append((turn in minted_turns(came), way))
            elif came.role == "tool" and results_reordered.__name__ in self.allowed:
                found += [(False, way) for way in _reordered(tree, at, node, messages)]
        return [way for _, way in sorted(found, key=itemgetter(0))]


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in what was told, `depth` labels down, reached from `before` by equal messages after a difference.

    `recorded` are the messages that stand where others came, `names` why those are accepted.
    """

    node: ToldNode
    depth: int
    before: _Place | None = None
    recorded: tuple[Message, ...] = ()
    names: tuple[str, ...] = ()


def _follow(labels: list[bytes], way: _Place) -> tuple[_Place, _Place | None]:
    """As far down as messages are equal, and the deepest place on the way that ends a reply."""
    node, depth = way.node, way.depth
    valued, valued_depth = (node, depth) if node.has_value else (None, 0)
    while depth < len(labels):
        child = node.child(labels[depth])
        if child is None:
            break
        node, depth = child, depth + 1
        if node.has_value:
            valued, valued_depth = node, depth
    return _Place(node, depth, way), _Place(valued, valued_depth, way) if valued is not None else None


def _changed(place: _Place | None) -> Iterator[tuple[int, tuple[Message, tuple[str, ...]]]]:
    """By their index, the recorded messages on the way to `place` that others came for, and why they are accepted."""
    while place is not None:
        start = place.depth - 1 - len(place.recorded)
        yield from ((start + n, (message, place.names)) for n, message in enumerate(place.recorded))
        place = place.before


def _reordered(tree: TraceTree, at: _Place, node: ToldNode, messages: tuple[Message, ...]) -> Iterator[_Place]:
    """The way over results that are recorded in another order, `node` the first of them."""
    start, last = at.depth - 1, len(messages) - 1  # the last is to be answered, and so is in no turn's way
    end = next((i for i in range(start, last) if messages[i].role != "tool"), last)
    recorded = [tree.message(tree.first_below(node), start)]
    while len(recorded) < end - start and len(node.children) == 1:
        (node,) = node.children
        recorded.append(tree.message(tree.first_below(node), start + len(recorded)))
    came = results_reordered(recorded, messages[start : start + len(recorded)])
    if came == recorded:
        yield _Place(node, at.depth + len(recorded), at, tuple(recorded), (results_reordered.__name__,))


def _meant(equal: tuple[str, ...], reply: Message) -> str:
    """Of turns that said the same, the one that an id names; else the first choice of the last that were told."""
    named = minted_turns(reply)
    return next((turn for turn in equal if turn in named), equal[-1])


def _as_recorded(
    conversation: Conversation, changed: dict[int, tuple[Message, tuple[str, ...]]], num_known: int
) -> Conversation:
    """The known messages as they are recorded; what follows refers to their calls by the recorded ids."""
    messages = list(conversation.messages)
    ids: dict[str | None, str] = {}
    for index, (recorded, _) in changed.items():
        pairs = zip(messages[index].tool_calls, recorded.tool_calls, strict=True)
        ids |= {theirs.id: ours.id for theirs, ours in pairs}
        messages[index] = recorded
    for index in range(num_known, len(messages)):
        id = messages[index].tool_call_id
        if id is not None and ids.get(id, id) != id:
            messages[index] = replace(messages[index], tool_call_id=ids[id])
    return replace(conversation, messages=tuple(messages))
