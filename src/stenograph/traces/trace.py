"""Prefix tree of turns: a path's ids are exactly what the engine saw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from typing import Literal, TypeVar

import numpy as np

from stenograph.errors import TraceError
from stenograph.traces.digests import message_digests, tools_digest
from stenograph.traces.tree import Node as PrefixNode
from stenograph.traces.tree import PrefixTree
from stenograph.types import Ids, Message, Turn

TurnState = Literal["committed", "delivered", "undelivered"]
ToldNode = PrefixNode[bytes, tuple[str, ...]]
AnyNode = TypeVar("AnyNode", bound="Node")
EMPTY: Ids = np.empty(0, np.int32)
_WORTH_SHARING = 64  # tokens


@dataclass(slots=True, eq=False)
class Node:
    """The ids that one node adds to its parent's path: context, which another branch may cut in two."""

    parent: Node | None
    start: int  # tokens before this node on its path
    ids: Ids
    children: tuple[Node, ...] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(slots=True, eq=False, kw_only=True)
class Output(Node):
    """What a turn sampled, never cut. `before` is the turn whose conversation it goes on from, on its path or not.

    `told` is where its reply ends what was said, and `num_messages` how many messages that are.
    """

    turn: Turn
    before: Output | None
    told: ToldNode
    num_messages: int
    state: TurnState = "committed"

    @property
    def reply(self) -> Message:
        """The reply as a message that names its turn."""
        return replace(self.turn.reply.message(), turn=self.turn.id)


class TraceTree:
    """One session's turns. Not thread-safe: the store locks what is added, and who reads shares its event loop."""

    def __init__(self) -> None:
        self._root = Node(None, 0, EMPTY)
        self._outputs: dict[str, Output] = {}  # by turn, oldest first
        # What was said: the tools, then message by message; the turns that a conversation's reply may be, where it
        # ends in one.
        self.told: PrefixTree[bytes, tuple[str, ...]] = PrefixTree()
        self._last_path: tuple[Output | None, Ids] = (None, EMPTY)

    # --- recording -----------------------------------------------------------------------------------------------

    def add(self, turn: Turn, parent: str | None) -> int | None:
        """Hang `turn` below `parent`'s output where it extends that, else below the longest recorded prefix of its ids.

        Returns the position at which its context leaves what other turns were told: a fork. None where it is new at
        the end of a branch, or all of it was told before: such a turn is a sibling.
        """
        return self.add_siblings((turn,), parent)[0]

    def add_siblings(self, turns: Sequence[Turn], parent: str | None) -> list[int | None]:
        """Add turns that answer one and the same request, all or none of them."""
        before = None if parent is None else self._outputs[parent]
        keys = self.check(turns, parent)
        # From here on nothing fails.
        told = [self._tell(turn, key, before) for turn, key in reversed(list(zip(turns, keys, strict=True)))]
        return [self._hang(turn, before, at) for turn, at in zip(turns, reversed(told), strict=True)]

    def check(self, turns: Sequence[Turn], parent: str | None) -> list[list[bytes]]:
        """What each turn is found by, after `parent`. Raises TraceError where one of them cannot be added."""
        if parent is not None and parent not in self._outputs:
            raise TraceError(f"turn {parent} is not recorded, and nothing can go on from it")
        for turn in turns:
            if turn.id in self._outputs:
                raise TraceError(f"turn {turn.id} is recorded already")
        first = [] if parent is not None else [tools_digest(turns[0].tools)]
        return [[*first, *message_digests((*turn.messages, turn.reply.message()))] for turn in turns]

    def shared(self, turn: Turn, parent: str | None) -> tuple[str, int] | None:
        """A turn that was told how a new one's context begins, in the same place, and how many ids; None for few."""
        at = self._outputs[parent] if parent is not None and turn.extends else self._root
        node, num_shared, _ = self._find(at, turn.context_ids)
        if num_shared < _WORTH_SHARING:
            return None
        while not isinstance(node, Output):
            node = node.children[0]
        return node.turn.id, num_shared

    def _tell(self, turn: Turn, key: list[bytes], before: Output | None) -> ToldNode:
        """Siblings that say the same share a place; the first choice is told last, and so is found first."""
        at = None if before is None else before.told
        known = self.told.search(key, at=at)
        equal = known.nodes[-1].value if known.length == len(key) and known.nodes[-1].has_value else ()
        return self.told.insert(key, (*equal, turn.id), at=at)

    def _hang(self, turn: Turn, before: Output | None, told: ToldNode) -> int | None:
        extended = before if before is not None and turn.extends else self._root
        node, num_shared = self._descend(extended, turn.context_ids)
        fork = self._fork(node, before, turn) if num_shared < len(turn.context_ids) else None
        turn = _slim(turn, num_shared, before)
        if len(turn.context_ids):
            node = _hang_in(Node(node, node.end, turn.context_ids))
        num_messages = len(turn.messages) + 1 + (before.num_messages if before is not None else 0)
        output = Output(node, node.end, turn.output_ids, turn=turn, before=before, told=told, num_messages=num_messages)
        self._outputs[turn.id] = _hang_in(output)
        return fork

    def _fork(self, node: Node, before: Output | None, turn: Turn) -> int | None:
        """Where a branch begins that goes on from `node`: there, unless one ends there, or where it left another."""
        if before is None or turn.extends:
            return node.end if node.children else None
        lost = set(self._path(before))
        return next((kept.end for kept in reversed(self._path(node)) if kept in lost), 0)

    def mark(self, turn: str, state: TurnState) -> None:
        self._outputs[turn].state = state

    def release(self) -> None:
        """Let go of everything; without this, nodes that know their parents would wait for the garbage collector."""
        for node in [self._root, *self.nodes()]:
            node.children = ()
        self._root, self._outputs, self.told = Node(None, 0, EMPTY), {}, PrefixTree()
        self._last_path = None, EMPTY

    # --- reading -------------------------------------------------------------------------------------------------

    @property
    def turns(self) -> Mapping[str, Turn]:
        """Every turn by its id, oldest first."""
        return {name: output.turn for name, output in self._outputs.items()}

    def __contains__(self, turn: object) -> bool:
        return turn in self._outputs

    def node(self, turn: str) -> Output:
        return self._outputs[turn]

    def turn(self, turn: str) -> Turn:
        return self._outputs[turn].turn

    def parent(self, turn: str) -> str | None:
        """The turn whose reply `turn`'s conversation goes on from."""
        before = self._outputs[turn].before
        return None if before is None else before.turn.id

    def state(self, turn: str) -> TurnState:
        return self._outputs[turn].state

    def path_ids(self, turn: str) -> Ids:
        """Ids of a turn's prompt and output, as the engine saw them; not to be written to.

        The last path is kept in one piece: the next one nearly always goes on from it.
        """
        last, known = self._last_path
        node: Node | None = self.node(turn)
        parts: list[Ids] = []
        while node is not None and node is not last:
            parts.append(node.ids)
            node = node.parent
        ids = np.concatenate([known if node is not None else EMPTY, *reversed(parts)])
        self._last_path = self.node(turn), ids
        return ids

    def path_turns(self, turn: str) -> list[str]:
        """The turns whose outputs lie on the path to `turn`, oldest first, `turn` included."""
        return [node.turn.id for node in self._path(self.node(turn)) if isinstance(node, Output)]

    def said(self, turn: str, start: int = 0) -> tuple[Message, ...]:
        """The conversation with `turn`'s reply at its end, from the message at `start` on."""
        parts: list[tuple[Message, ...]] = []
        output: Output | None = self._outputs[turn]
        num_messages = output.num_messages
        while output is not None and output.num_messages > start:
            parts.append((*output.turn.messages, output.reply))
            output = output.before
        said = tuple(chain.from_iterable(reversed(parts)))
        return said[len(said) - (num_messages - start) :] if num_messages > start else ()

    def message(self, turn: str, index: int) -> Message:
        """The message at `index` of what `said` gives, found from its end."""
        output = self._outputs[turn]
        while output.before is not None and index < output.before.num_messages:
            output = output.before
        messages = output.turn.messages
        offset = index - (output.num_messages - 1 - len(messages))
        return messages[offset] if offset < len(messages) else output.reply

    def first_below(self, told: ToldNode) -> str:
        """A turn whose reply ends at `told` or is the next one below it."""
        while not told.has_value:
            told = next(iter(told.children))
        return told.value[-1]

    def last_below(self, told: ToldNode) -> str:
        """The turn at the end of the branch that was begun last below `told`."""
        while told.children:
            told = list(told.children)[-1]
        return told.value[-1]

    def leaves(self) -> list[str]:
        """Turns that no other turn continues, oldest first: one per branch."""
        return [name for name, output in self._outputs.items() if not output.children]

    def nodes(self) -> Iterator[Node]:
        """Every node but the empty root, parents before children."""
        stack = list(reversed(self._root.children))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    # --- the nodes -----------------------------------------------------------------------------------------------

    def _descend(self, node: Node, ids: Ids) -> tuple[Node, int]:
        """Follow `ids` down from `node` as far as they are recorded, splitting the context node where they leave it."""
        node, position, num_entered = self._find(node, ids)
        return (self._split(node, num_entered) if num_entered < len(node.ids) else node), position

    @staticmethod
    def _find(node: Node, ids: Ids) -> tuple[Node, int, int]:
        """The last node that `ids` enter on their way down from `node`, how many do in all, and how many that one."""
        position, num_entered = 0, len(node.ids)
        while position < len(ids):
            ways = [(common, child) for child in node.children if (common := _num_shared(child, ids[position:]))]
            if not ways:
                break
            num_entered, node = max(ways, key=itemgetter(0))
            position += num_entered
            if num_entered < len(node.ids):
                break
        return node, position, num_entered

    @staticmethod
    def _split(node: Node, at: int) -> Node:
        """Cut a context node in two, so that another branch can begin at token `at`; returns the upper part."""
        assert node.parent is not None
        upper = Node(node.parent, node.start, node.ids[:at], children=(node,))
        node.parent.children = tuple(upper if child is node else child for child in node.parent.children)
        node.parent, node.start, node.ids = upper, upper.end, node.ids[at:]
        return upper

    @staticmethod
    def _path(node: Node) -> list[Node]:
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]


def _hang_in(node: AnyNode) -> AnyNode:
    """Make `node` the last of its parent's children."""
    assert node.parent is not None
    node.parent.children += (node,)
    return node


def _slim(turn: Turn, num_shared: int, before: Output | None) -> Turn:
    """`turn` without what is held already: ids that others were told too, and values equal to its parent's."""
    if num_shared:
        turn = replace(turn, context_ids=turn.context_ids[num_shared:].copy())
    if before is not None:
        held = before.turn
        same = {name: getattr(held, name) for name in _OFTEN_EQUAL if getattr(held, name) == getattr(turn, name)}
        turn = replace(turn, **same)
    return turn


_OFTEN_EQUAL = ("sampling", "versions", "tools", "notes", "accepted", "role_evidence")


def _num_shared(node: Node, ids: Ids) -> int:
    """How many of `ids` a path enters `node` with: an output as a whole, for part of one is nothing that was sent."""
    if not len(node.ids) or node.ids[0] != ids[0]:  # nearly always, and not worth comparing all
        return 0
    common = num_equal(node.ids, ids)
    return 0 if isinstance(node, Output) and common < len(node.ids) else common


def num_equal(ids: Ids, others: Ids) -> int:
    """How many of two paths' ids are equal, from their beginning on."""
    n = min(len(ids), len(others))
    different = np.flatnonzero(ids[:n] != others[:n])
    return int(different[0]) if len(different) else n
