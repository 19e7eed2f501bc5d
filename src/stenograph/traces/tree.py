"""A tree of values by sequences of labels: any depth, no recursion, and nothing in it points back up.

Without a way up there are no cycles, so that a tree goes with its last reference; paths come from searching.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

Label = TypeVar("Label", bound=Hashable)
Value = TypeVar("Value")

_ABSENT: Any = object()  # None is a value


@final
class Node(Generic[Label, Value]):
    """One label below its parent; the root's is None."""

    # Most nodes have one child: it stands here by itself, and a dict takes over with the second.
    __slots__ = ("_below", "_held", "label", "released")

    def __init__(self, label: Label) -> None:
        hash(label)  # raises for what could not be a dict's key either
        self.label = label
        self.released = False
        self._held: Value = _ABSENT
        self._below: Node[Label, Value] | dict[Label, Node[Label, Value]] | None = None

    @property
    def children(self) -> Collection[Node[Label, Value]]:
        """In the order of insertion."""
        below = self._below
        if below is None:
            return ()
        return (below,) if isinstance(below, Node) else below.values()

    def child(self, label: Label) -> Node[Label, Value] | None:
        below = self._below
        if below is None:
            return None
        if isinstance(below, Node):
            return below if below.label is label or below.label == label else None
        return below.get(label)

    @property
    def has_value(self) -> bool:
        return self._held is not _ABSENT

    @property
    def value(self) -> Value:
        """Raises LookupError where there is none."""
        if self._held is _ABSENT:
            raise LookupError("this node has no value")
        return self._held

    def __repr__(self) -> str:
        held = f"value={self._held!r}, " if self.has_value else ""
        return f"Node({held}{len(self.children)} children)"

    def _add(self, child: Node[Label, Value]) -> Node[Label, Value]:
        """Hang in a child whose label is new here; returns it."""
        below = self._below
        if below is None:
            self._below = child
        elif isinstance(below, Node):
            self._below = {below.label: below, child.label: child}
        else:
            below[child.label] = child
        return child

    def _remove(self, child: Node[Label, Value]) -> None:
        if isinstance(self._below, dict):
            del self._below[child.label]
        else:
            self._below = None


@dataclass(frozen=True, slots=True)
class Match(Generic[Label, Value]):
    """How far a key is in the tree: `length` labels, along `nodes`, the one where it starts first."""

    length: int
    nodes: tuple[Node[Label, Value], ...]


def _root() -> Node[Any, Any]:
    return Node(None)


class PrefixTree(Generic[Label, Value]):
    """Maps keys (sequences of labels) to values. The empty key is the root's. Not thread-safe."""

    def __init__(self) -> None:
        self.root: Node[Label, Value] = _root()

    def insert(self, key: Iterable[Label], value: Value, *, at: Node[Label, Value] | None = None) -> Node[Label, Value]:
        """Put `value` under `key`, in place of what is there; with `at`, `key` goes on from that node.

        At most one look-up a label. Raises LookupError where `at` was released, TypeError for a label without a hash.
        """
        node = self.root if at is None else at
        if node.released:
            raise LookupError("this node was released from its tree; search for one that is in it")
        labels = iter(key)
        for label in labels:
            child = node.child(label)
            if child is None:
                top: Node[Label, Value] = Node(label)
                end = top
                for further in labels:
                    end = end._add(Node(further))
                node._add(top)  # last, so that a label that cannot be one leaves nothing of the key behind
                node = end
                break
            node = child
        node._held = value
        return node

    def search(
        self, key: Iterable[Label], valued: bool = False, *, at: Node[Label, Value] | None = None
    ) -> Match[Label, Value]:
        """Follow `key` as far as it goes, from the root or from `at`.

        With `valued`, only down to the deepest node that has a value; where none has, there are no nodes.
        """
        node = self.root if at is None else at
        nodes = [node]
        num_valued = 1 if node.has_value else 0  # nodes up to the deepest value
        for label in key:
            below = node._below  # as `child` does it, without a call a label
            if type(below) is Node:
                if below.label != label and below.label is not label:
                    break
                node = below
            elif below is None or (child := below.get(label)) is None:
                break
            else:
                node = child
            nodes.append(node)
            if node._held is not _ABSENT:
                num_valued = len(nodes)
        if valued:
            del nodes[num_valued:]
        return Match(max(len(nodes) - 1, 0), tuple(nodes))

    def keys(self) -> Iterator[tuple[Label, ...]]:
        """Every key, depth first, siblings as they were inserted; the tree must stay as it is meanwhile."""
        if self.root.has_value:
            yield ()
        path: list[Label] = []
        below = [iter(self.root.children)]
        while below:
            node = next(below[-1], None)
            if node is None:
                below.pop()
                if path:
                    path.pop()
                continue
            path.append(node.label)
            below.append(iter(node.children))
            if node.has_value:
                yield tuple(path)

    def release(self, key: Iterable[Label] | None = None, on_release: Callable[[Value], object] | None = None) -> int:
        """Let go of one key's value, or of all, children before their parents; returns how many values went.

        With a key: what is below it stays, and nodes that hold nothing any more go with it; an unknown key is 0. What
        `on_release` raises stops nothing, is nobody's second release, and comes back in an ExceptionGroup at the end.
        """
        gone = self._drain() if key is None else self._prune(list(key))
        errors: list[BaseException] = []
        for value in gone:
            if on_release is not None:
                try:
                    on_release(value)
                except BaseException as e:
                    errors.append(e)
        if errors:
            raise BaseExceptionGroup(f"{len(errors)} of {len(gone)} values were not released cleanly", errors)
        return len(gone)

    def _drain(self) -> list[Value]:
        """Empty the tree; its values, children before their parents."""
        preorder = list(self._nodes())
        self.root = _root()
        values = []
        for node in reversed(preorder):  # siblings come last first, and that is no parent before its child
            if node.has_value:
                values.append(node.value)
            node._held, node.released = _ABSENT, True
            node._below = None
        return values

    def _prune(self, key: list[Label]) -> list[Value]:
        """Take the value of `key` out, and the nodes that are then for nothing."""
        match = self.search(key)
        node = match.nodes[-1]
        if match.length < len(key) or not node.has_value:
            return []
        value, node._held = node.value, _ABSENT
        for depth in range(len(key), 0, -1):
            node = match.nodes[depth]
            if node.children or node.has_value:
                break
            node.released = True
            match.nodes[depth - 1]._remove(node)
        return [value]

    # --- as one flat list: copied, pickled and compared without recursion ------------------------------------------

    def _nodes(self) -> Iterator[Node[Label, Value]]:
        """Every node, parents before children."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(tuple(node.children)))

    def __getstate__(self) -> list[tuple[Label, int, tuple[Value, ...]]]:
        """Nodes in preorder: label, number of children, and the value, if any."""
        return [(node.label, len(node.children), (node.value,) if node.has_value else ()) for node in self._nodes()]

    def __setstate__(self, state: list[tuple[Label, int, tuple[Value, ...]]]) -> None:
        waiting: list[tuple[Node[Label, Value], int]] = []  # nodes, and how many of their children are to come
        for label, num_children, held in state:
            node: Node[Label, Value] = Node(label)
            if not waiting:
                self.root = node
            else:
                while waiting[-1][1] == 0:
                    waiting.pop()
                parent, num_left = waiting.pop()
                parent._add(node)
                waiting.append((parent, num_left - 1))
            if held:
                (node._held,) = held
            waiting.append((node, num_children))

    def __len__(self) -> int:
        """How many keys have a value."""
        return sum(node.has_value for node in self._nodes())

    def __bool__(self) -> bool:
        """Whether there is anything in it."""
        return self.root.has_value or bool(self.root.children)

    def __eq__(self, other: object) -> bool:
        """Whether the keys and their values are equal; the order of siblings does not count."""
        if not isinstance(other, PrefixTree):
            return NotImplemented
        pairs = [(self.root, other.root)]
        while pairs:
            mine, theirs = pairs.pop()
            if mine.has_value != theirs.has_value or (mine.has_value and mine.value != theirs.value):
                return False
            if len(mine.children) != len(theirs.children):
                return False
            for node in mine.children:
                other_node = theirs.child(node.label)
                if other_node is None:
                    return False
                pairs.append((node, other_node))
        return True

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        num_nodes = sum(1 for _ in self._nodes())
        return f"PrefixTree({len(self)} values, {num_nodes} nodes)"
