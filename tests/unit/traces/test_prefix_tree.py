"""Keys and values as a dict has them, and whatever the shape: no recursion, no cycle, each value released once."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.traces.tree import PrefixTree

KEYS = st.lists(st.integers(0, 2), max_size=5).map(tuple)
ENTRIES = st.dictionaries(KEYS, st.none() | st.integers(), max_size=12)
Tree = PrefixTree[int, Any]
DEEP = 100_000


def grown(entries: dict[tuple[int, ...], Any]) -> Tree:
    tree: Tree = PrefixTree()
    for key, value in entries.items():
        tree.insert(key, value)
    return tree


def chain() -> Tree:
    tree: Tree = PrefixTree()
    tree.insert(range(DEEP), "end")
    return tree


def nested() -> Tree:
    """5,000 keys, each the beginning of the next."""
    tree: Tree = PrefixTree()
    node = tree.insert((), 0)
    for depth in range(1, 5_000):
        node = tree.insert((depth,), depth, at=node)
    return tree


# --- values by keys ------------------------------------------------------------------------------------------------


@given(ENTRIES)
def test_it_holds_what_was_put_in(entries: dict[tuple[int, ...], Any]) -> None:
    tree = grown(entries)
    assert {key: tree.search(key).nodes[-1].value for key in entries} == entries
    assert sorted(tree.keys()) == sorted(entries)
    assert (len(tree), bool(tree)) == (len(entries), bool(entries))


@given(ENTRIES, KEYS)
def test_searching_goes_as_far_as_there_are_labels_and_back_to_a_value(
    entries: dict[tuple[int, ...], Any], key: tuple[int, ...]
) -> None:
    tree = grown(entries)
    prefixes = {known[:n] for known in entries for n in range(len(known) + 1)} | {()}
    match = tree.search(key)
    assert match.length == max(n for n in range(len(key) + 1) if key[:n] in prefixes)
    assert (len(match.nodes), match.nodes[0]) == (match.length + 1, tree.root)
    valued = tree.search(key, valued=True)
    deepest = max((n for n in range(len(key) + 1) if key[:n] in entries), default=None)
    if deepest is None:
        assert (valued.length, valued.nodes) == (0, ())
    else:
        assert (valued.length, valued.nodes[-1].value) == (deepest, entries[key[:deepest]])
        assert valued.nodes == match.nodes[: deepest + 1]


def test_none_is_a_value_and_a_later_one_takes_its_place() -> None:
    tree: Tree = PrefixTree()
    assert not tree.root.has_value
    with pytest.raises(LookupError):
        _ = tree.root.value
    node = tree.insert((), None)
    assert (node is tree.root, node.has_value, node.value) == (True, True, None)
    assert tree.insert((), 2) is node
    assert node.value == 2


def test_keys_come_depth_first_as_they_were_inserted() -> None:
    tree = grown({(2,): 0, (1, 5): 1, (): 2, (2, 0): 3, (1,): 4, (3, 3, 3): 5})
    assert list(tree.keys()) == [(), (2,), (2, 0), (1,), (1, 5), (3, 3, 3)]
    first = tree.keys()
    assert isinstance(first, Iterator)  # nothing is gathered before it is asked for
    assert next(first) == ()


def test_a_key_goes_on_from_a_node_in_hand() -> None:
    tree: Tree = PrefixTree()
    node = tree.insert((1, 2), "a")
    assert tree.insert((3,), "b", at=node) is tree.search((1, 2, 3)).nodes[-1]
    assert tree.insert((), "c", at=node) is node
    assert {key: tree.search(key).nodes[-1].value for key in list(tree.keys())} == {(1, 2): "c", (1, 2, 3): "b"}


@pytest.mark.parametrize("key", [[1, 2, []], [1, [], 2], [[]]])
def test_what_can_be_no_label_leaves_nothing_behind(key: list[Any]) -> None:
    tree = grown({(1,): 0})
    before = copy.copy(tree)
    with pytest.raises(TypeError):
        tree.insert(key, 1)
    assert tree == before


class Label:
    """Counts how often any is hashed or compared."""

    asked = 0

    def __init__(self, name: object) -> None:
        self.name = name

    def __hash__(self) -> int:
        Label.asked += 1
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        Label.asked += 1
        return isinstance(other, Label) and self.name == other.name


@pytest.mark.parametrize("num_branches", [1, 64])
def test_a_label_costs_one_look_up_at_most_however_many_branches_there_are(num_branches: int) -> None:
    tree: PrefixTree[Label, int] = PrefixTree()
    stem = [Label(n) for n in range(20)]
    node = tree.insert(stem, 0)
    for branch in range(num_branches):
        tree.insert([Label(("branch", branch)), Label("leaf")], branch, at=node)
    asked = [Label(label.name) for label in (*stem, Label(("branch", num_branches - 1)), Label("leaf"))]
    Label.asked = 0
    assert tree.search(asked).length == 22
    assert Label.asked <= 2 * 22  # a look-up hashes and compares
    Label.asked = 0
    tree.insert([Label("new"), Label("and"), Label("more")], 1, at=node)
    assert Label.asked <= 2 * 3


def test_a_label_is_itself_even_where_it_equals_nothing() -> None:
    tree: PrefixTree[float, int] = PrefixTree()
    node = tree.insert((math.nan,), 0)
    for sibling in (math.nan, 1.0):  # none, then one
        tree.insert((sibling,), 0)
        assert tree.search((math.nan,)).nodes[1:] == (node,)
        assert tree.insert((math.nan,), 1) is node


def test_a_node_tells_its_children_in_the_order_that_they_came() -> None:
    tree: Tree = PrefixTree()
    for count, label in enumerate((2, 0, 1), start=1):
        node = tree.insert((label,), label)
        assert (node.label, tree.root.child(label)) == (label, node)
        assert [child.value for child in tree.root.children] == [2, 0, 1][:count]
        assert (len(tree.root.children), tree.root.child(3), len(node.children)) == (count, None, 0)


# --- release -------------------------------------------------------------------------------------------------------


@given(ENTRIES)
def test_all_is_released_once_and_children_before_their_parents(entries: dict[tuple[int, ...], Any]) -> None:
    tree = grown({key: key for key in entries})
    gone: list[tuple[int, ...]] = []
    assert tree.release(on_release=gone.append) == len(entries)
    assert sorted(gone) == sorted(entries)
    for i, key in enumerate(gone):
        assert not any(later[: len(key)] == key for later in gone[i + 1 :])
    assert (list(tree.keys()), tree.release(on_release=gone.append), len(gone)) == ([], 0, len(entries))
    tree.insert((1,), "again")
    assert list(tree.keys()) == [(1,)]


@given(ENTRIES, KEYS)
def test_one_key_goes_alone_with_the_nodes_that_were_there_for_it(
    entries: dict[tuple[int, ...], Any], key: tuple[int, ...]
) -> None:
    tree = grown(entries)
    gone: list[Any] = []
    known = key in entries
    assert tree.release(key, gone.append) == known == len(gone)
    rest = {other: value for other, value in entries.items() if other != key}
    assert tree == grown(rest)
    assert repr(tree) == repr(grown(rest))  # no node is left over
    assert tree.release(key, gone.append) == 0


def test_what_is_released_takes_nothing_in() -> None:
    tree = grown({(1, 2): 0})
    node = tree.search((1, 2)).nodes[-1]
    tree.release((1, 2))
    root = tree.root
    tree.release()
    for gone in (node, root):
        with pytest.raises(LookupError, match="released"):
            tree.insert((3,), 1, at=gone)
    assert not tree


@pytest.mark.parametrize("key", [None, (1,)])
def test_a_callback_that_raises_stops_no_other_and_is_told_of(key: tuple[int, ...] | None) -> None:
    tree = grown({(): 0, (1,): 1, (1, 2): 2})
    seen: list[int] = []

    def free(value: int) -> None:
        seen.append(value)
        if value:
            raise OSError(f"{value} is busy")

    with pytest.raises(ExceptionGroup) as caught:
        tree.release(key, free)
    assert seen == ([2, 1, 0] if key is None else [1])
    assert [str(e) for e in caught.value.exceptions] == [f"{value} is busy" for value in seen if value]
    assert tree.release(key, free) == 0
    assert seen == ([2, 1, 0] if key is None else [1])


# --- depth ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [chain, nested])
def test_no_depth_is_too_deep(make: Any) -> None:
    tree: Tree = make()
    keys = list(tree.keys())
    assert len(keys) == len(tree)
    assert tree.search(keys[-1]).length == len(keys[-1])
    for other in (copy.copy(tree), copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        assert other == tree
        assert list(other.keys()) == keys
    assert "values" in repr(tree)
    assert repr(tree.root).startswith("Node(")
    assert tree.release(keys[-1]) == 1
    gone: list[Any] = []
    assert tree.release(on_release=gone.append) == len(keys) - 1 == len(gone)


class Held:
    """A value that can be watched going."""


@pytest.mark.parametrize("depth", [1, DEEP])
def test_a_tree_goes_with_its_last_reference(depth: int) -> None:
    tree: Tree = PrefixTree()
    value = Held()
    gone = weakref.ref(value)
    tree.insert(range(depth), value)
    gc.disable()  # what needs a collection is a cycle
    try:
        del value, tree
        assert gone() is None
    finally:
        gc.enable()


@given(ENTRIES)
def test_a_copy_is_equal_and_apart(entries: dict[tuple[int, ...], Any]) -> None:
    tree = grown(entries)
    for other in (copy.copy(tree), copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        assert other == tree
        assert list(other.keys()) == list(tree.keys())
        other.insert((9,), "more")
        assert other != tree
    assert tree != grown({**entries, (9,): None})
    assert tree != entries


def test_labels_may_be_anything_that_hashes() -> None:
    tree: PrefixTree[Any, int] = PrefixTree()
    labels: Iterable[Any] = (None, b"digest", ("a", 1))
    tree.insert(labels, 1)
    assert list(tree.keys()) == [(None, b"digest", ("a", 1))]
    assert pickle.loads(pickle.dumps(tree)) == tree
