"""Prefix tree of turns: a path's ids are exactly what the engine saw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from stenograph.errors import TraceError
from stenograph.traces.digests import conversation_labels, message_digests, tools_digest
from stenograph.traces.tree import Node as ToldNode
from stenograph.traces.tree import PrefixTree
from stenograph.types import Conversation, Ids, Message, Turn

TurnState = Literal["committed", "delivered", "undelivered"]
EMPTY: Ids = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Node:
    """The ids that one node adds to its parent's path. `turn` is set on output nodes, which are never split."""

    id: int
    parent: Node | None
    start: int  # tokens before this node on its path
    ids: Ids
    turn: str | None = None
    children: list[Node] = field(default_factory=list)

    @property
    def kind(self) -> Literal["context", "output"]:
        return "context" if self.turn is None else "output"

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class Match:
    """The deepest recorded turn that a conversation continues; messages[:num_known] are recorded."""

    turn: str
    num_known: int


class TraceTree:
    """One session's turns. Not thread-safe: its store serialises access."""

    def __init__(self) -> None:
        self._root = Node(0, None, 0, EMPTY)
        self._num_nodes = 1
        self.turns: dict[str, Turn] = {}
        self.parents: dict[str, str | None] = {}
        self.states: dict[str, TurnState] = {}
        self._nodes: dict[str, Node] = {}
        # What was said, message by message: the turns that a conversation's reply may be, where it ends in one.
        self._told: PrefixTree[bytes, tuple[str, ...]] = PrefixTree()
        self._told_at: dict[str, ToldNode[bytes, tuple[str, ...]]] = {}

    def match(self, conversation: Conversation, labels: Sequence[bytes] | None = None) -> Match | None:
        """Find the deepest turn whose conversation and reply are the first messages of `conversation`, not all.

        `labels` are the conversation's where they are known already; what follows them does not count.
        """
        messages = conversation.messages
        if labels is None:
            labels = conversation_labels(conversation)
        found = self._told.search(labels[: len(messages)], valued=True)  # all but the last message
        if not found.nodes:
            return None
        num_known = found.length - 1
        return Match(self._meant(found.nodes[-1].value, messages[num_known - 1]), num_known)

    def add(self, turn: Turn, parent: str | None) -> int | None:
        """Hang `turn` below `parent`'s output, or, with no parent, below the longest recorded prefix of its ids.

        Returns the position at which its context leaves what other turns were told: a fork. None where it is new at
        the end of a branch, or all of it was told before: such a turn is a sibling.
        """
        return self.add_siblings((turn,), parent)[0]

    def add_siblings(self, turns: Sequence[Turn], parent: str | None) -> list[int | None]:
        """Add turns that answer one and the same request, all or none of them."""
        first = () if parent is not None else (tools_digest(turns[0].tools),)
        keys = [[*first, *message_digests((*turn.messages, turn.reply.message()))] for turn in turns]
        for turn in turns:
            if turn.id in self.turns:
                raise TraceError(f"turn {turn.id} is recorded already")
        # From here on nothing fails.
        for turn, key in reversed(list(zip(turns, keys, strict=True))):
            at = None if parent is None else self._told_at[parent]
            known = self._told.search(key, at=at)
            equal = known.nodes[-1].value if known.length == len(key) and known.nodes[-1].has_value else ()
            self._told_at[turn.id] = self._told.insert(key, (*equal, turn.id), at=at)
        return [self._hang(turn, parent) for turn in turns]

    def _meant(self, equal: tuple[str, ...], message: Message) -> str:
        """Of turns whose replies are equal, the one whose calls' ids came back; else the first choice told last."""
        ids = [call.id for call in message.tool_calls]
        same = (turn for turn in equal if [call.id for call in self.turns[turn].reply.tool_calls] == ids)
        return next(same, equal[-1]) if ids else equal[-1]

    def _hang(self, turn: Turn, parent: str | None) -> int | None:
        node, shared = self._descend(self._root if parent is None else self._nodes[parent], turn.context_ids)
        fork = None
        if shared:  # what others were told too is kept once
            turn = replace(turn, context_ids=turn.context_ids[shared:].copy())
        if len(turn.context_ids):
            fork = node.end if node.children else None
            node = self._new_node(node, turn.context_ids)
        self._nodes[turn.id] = self._new_node(node, turn.output_ids, turn.id)
        self.turns[turn.id] = turn
        self.parents[turn.id] = parent
        self.states[turn.id] = "committed"
        return fork

    def path_ids(self, turn: str) -> Ids:
        """Ids of a turn's prompt and output, as the engine saw them."""
        return np.concatenate([node.ids for node in self._path(self._nodes[turn])])

    def conversation(self, turn: str) -> Conversation:
        """What `turn` answered: the messages of the turns before it, their replies among them, and its own."""
        messages: list[Message] = []
        for name in self._lineage(turn):
            messages += self.turns[name].messages
            if name != turn:
                messages.append(self.turns[name].reply.message())
        return Conversation(tuple(messages), self.turns[turn].tools)

    def path_turns(self, turn: str) -> list[str]:
        """The turns whose outputs lie on the path to `turn`, oldest first, `turn` included."""
        return [node.turn for node in self._path(self._nodes[turn]) if node.turn is not None]

    def node(self, turn: str) -> Node:
        return self._nodes[turn]

    def leaves(self) -> list[str]:
        """Turns that no other turn continues, oldest first: one per branch."""
        return [turn for turn in self.turns if not self._nodes[turn].children]

    def nodes(self) -> Iterator[Node]:
        """Every node but the empty root, parents before children."""
        stack = list(reversed(self._root.children))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    def _descend(self, node: Node, ids: Ids) -> tuple[Node, int]:
        """Follow `ids` down from `node` as far as they are recorded, splitting the context node where they leave it."""
        position = 0
        while True:
            child, common = max(
                ((child, _common_prefix(child.ids, ids[position:])) for child in node.children),
                key=lambda pair: pair[1],
                default=(None, 0),
            )
            # A rendered path enters a sampled node only as a whole: part of an output is not something that was sent.
            if child is None or common == 0 or (child.kind == "output" and common < len(child.ids)):
                return node, position
            position += common
            if common < len(child.ids):
                return self._split(child, common), position
            node = child

    def _split(self, node: Node, at: int) -> Node:
        """Cut a context node in two, so that another branch can begin at token `at`; returns the upper part."""
        assert node.parent is not None
        upper = Node(self._num_nodes, node.parent, node.start, node.ids[:at], children=[node])
        self._num_nodes += 1
        siblings = node.parent.children
        siblings[siblings.index(node)] = upper
        node.parent, node.start, node.ids = upper, upper.end, node.ids[at:]
        return upper

    def _new_node(self, parent: Node, ids: Ids, turn: str | None = None) -> Node:
        node = Node(self._num_nodes, parent, parent.end, ids, turn)
        self._num_nodes += 1
        parent.children.append(node)
        return node

    def _lineage(self, turn: str) -> list[str]:
        """The turns that `turn` continues, oldest first, and itself."""
        lineage = [turn]
        while (parent := self.parents[lineage[-1]]) is not None:
            lineage.append(parent)
        return lineage[::-1]

    @staticmethod
    def _path(node: Node) -> list[Node]:
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]


def _common_prefix(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
