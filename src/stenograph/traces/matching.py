"""Finds the recorded turn that a request goes on from: equal messages first, then those that differ in known ways only.

Equal digests lead the whole way down at a look-up a message. Where one is missing, the recorded messages that stand in
its place are compared with it, and a difference that was accepted once is known from then on by its digest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

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
        best = _Way(tree.told.root, 0)
        ways = [best]
        while ways:
            way, valued = _follow(tree, labels, ways.pop())
            if valued is not None and valued.num_labels > best.num_labels:
                best = valued
            if 0 < way.num_labels < len(labels):
                ways += reversed(list(self._turn_offs(tree, way, labels, messages)))
        if best.num_labels == 0:
            return None
        num_known = best.num_labels - 1
        accepted = tuple(sorted({name for _, names in best.changed.values() for name in names}))
        changed = {index: message for index, (message, _) in best.changed.items()}
        asked = _as_recorded(conversation, changed, num_known) if changed else conversation
        return Match(_meant(best.node.value, messages[num_known - 1]), num_known, asked, accepted)

    def _turn_offs(
        self, tree: TraceTree, way: _Way, labels: list[bytes], messages: tuple[Message, ...]
    ) -> Iterator[_Way]:
        """Ways on from where no equal message stands, the likeliest first."""
        index, label = way.num_labels - 1, labels[way.num_labels]
        came = messages[index]
        known = self._known.get(label, {})
        found = []
        for node in reversed(list(way.node.children)):
            turn = tree.first_below(node)
            recorded = tree.message(turn, index)
            names = known.get(node.label) or accept(recorded, came, self.allowed)
            if names is not None:
                self._known.setdefault(label, {})[node.label] = names
                found.append((turn not in minted_turns(came), way.on(node, {index: (recorded, names)})))
            elif came.role == "tool" and results_reordered.__name__ in self.allowed:
                found += [(True, other) for other in _reordered(tree, way, node, messages)]
        yield from (on for _, on in sorted(found, key=lambda pair: pair[0]))


@dataclass(frozen=True, slots=True)
class _Way:
    """A place in what was told, `num_labels` down. `changed`: by index, recorded messages that others stand for."""

    node: ToldNode
    num_labels: int
    changed: dict[int, tuple[Message, tuple[str, ...]]] = field(default_factory=dict)

    def on(self, node: ToldNode, changed: dict[int, tuple[Message, tuple[str, ...]]]) -> _Way:
        return _Way(node, self.num_labels + len(changed), self.changed | changed)


def _follow(tree: TraceTree, labels: list[bytes], way: _Way) -> tuple[_Way, _Way | None]:
    """As far down as messages are equal, and the deepest place on the way that ends a reply."""
    found = tree.told.search(labels[way.num_labels :], at=way.node)
    valued = next((n for n in range(len(found.nodes) - 1, -1, -1) if found.nodes[n].has_value), None)
    end = replace(way, node=found.nodes[-1], num_labels=way.num_labels + found.length)
    if valued is None:
        return end, None
    return end, replace(way, node=found.nodes[valued], num_labels=way.num_labels + valued)


def _reordered(tree: TraceTree, way: _Way, node: ToldNode, messages: tuple[Message, ...]) -> Iterator[_Way]:
    """The way over results that are recorded in another order, `node` the first of them."""
    start = way.num_labels - 1
    last = len(messages) - 1  # which is to be answered, and so is in no turn's way
    end = next((i for i in range(start, last) if messages[i].role != "tool"), last)
    recorded, nodes = [], [node]
    while True:
        recorded.append(tree.message(tree.first_below(nodes[-1]), start + len(recorded)))
        if len(recorded) == end - start or len(nodes[-1].children) != 1:
            break
        nodes.append(next(iter(nodes[-1].children)))
    came = results_reordered(recorded, messages[start : start + len(recorded)])
    if came is not None and came == recorded:
        names = (results_reordered.__name__,)
        yield way.on(nodes[-1], {start + n: (message, names) for n, message in enumerate(recorded)})


def _meant(equal: tuple[str, ...], reply: Message) -> str:
    """Of turns that said the same, the one that an id names; else the first choice of the last that were told."""
    named = minted_turns(reply)
    return next((turn for turn in equal if turn in named), equal[-1])


def _as_recorded(conversation: Conversation, changed: dict[int, Message], num_known: int) -> Conversation:
    """The known messages as they are recorded; what follows refers to their calls by the recorded ids."""
    messages = list(conversation.messages)
    ids: dict[str | None, str] = {}
    for index, recorded in changed.items():
        pairs = zip(messages[index].tool_calls, recorded.tool_calls, strict=True)
        ids |= {theirs.id: ours.id for theirs, ours in pairs}
        messages[index] = recorded
    for index in range(num_known, len(messages)):
        id = messages[index].tool_call_id
        if id is not None and ids.get(id, id) != id:
            messages[index] = replace(messages[index], tool_call_id=ids[id])
    return replace(conversation, messages=tuple(messages))
