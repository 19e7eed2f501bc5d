"""A turn is read back as it was written, field by field and bit by bit."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.errors import TraceError
from stenograph.traces.trace import EMPTY
from stenograph.traces.written import Shared, read, write
from stenograph.types import Message, Sampling, Tool, Turn
from support.any_turns import any_families, any_turns
from support.turns import make_turn, user


def assert_same(found: object, expected: object) -> None:
    """Equal to the last field, those too that do not count where records are compared; and of the same types."""
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray) and isinstance(found, np.ndarray):
        assert found.dtype == expected.dtype
        assert found.flags.c_contiguous
        assert found.flags.writeable
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, tuple) and isinstance(found, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif hasattr(expected, "__dataclass_fields__"):
        for name in (field.name for field in fields(expected) if field.name != "digest"):  # type: ignore[arg-type]
            assert_same(getattr(found, name), getattr(expected, name))
    else:
        assert found == expected


@given(any_turns(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_turn_comes_back(turn: Turn, data: st.DataObject) -> None:
    num_shared = data.draw(st.integers(0, len(turn.context_ids)))
    shared = Shared("other", num_shared) if num_shared else None
    row = write(turn, None, "call", shared)
    assert_same(read(row, None, turn.context_ids[:num_shared]), turn)


@given(any_families())
@settings(max_examples=60, deadline=None)
def test_a_turn_that_goes_on_from_another_comes_back(family: tuple[Turn, Turn]) -> None:
    parent, turn = family
    row = write(turn, parent, "call", None)
    assert row.parent == parent.id
    assert_same(read(row, parent, EMPTY), turn)


@pytest.mark.parametrize("changed", [{"num_instructions": 0}, {"versions": ((0, 3), (1, 4))}, {"extends": False}])
def test_what_differs_from_the_parent_is_written(changed: dict[str, Any]) -> None:
    parent = replace(make_turn([1], [2, 3]), num_instructions=None)
    turn = replace(make_turn([4], [5, 6]), **changed)
    assert_same(read(write(turn, parent, "call", None), parent, EMPTY), turn)


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


def test_parameters_may_be_as_deep_as_a_request_can_say() -> None:
    turn = make_turn([1], [2], tools=(Tool("f", "", nested(200)),))
    assert_same(read(write(turn, None, "call", None), None, EMPTY), turn)


UNWRITABLE = [
    replace(make_turn([1], [2]), sampling=Sampling(seed=2**64)),
    replace(make_turn([1], [2]), role_evidence="\udcff"),
    make_turn([1], [2], asked=[Message("user", "\ud800")]),
    make_turn([1], [2], tools=(Tool("f", "", nested(2000)),)),
]


@pytest.mark.parametrize("turn", UNWRITABLE, ids=["seed", "evidence", "message", "tools"])
def test_what_cannot_be_written_is_said_in_one_line(turn: Turn) -> None:
    with pytest.raises(TraceError, match=rf"^turn {turn.id} cannot be written: ") as told:
        write(turn, None, "call", None)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("field", ["id", "parent", "call", "context_ids", "output_ids", "rollout_logprobs", "record"])
def test_the_checksum_is_of_every_part(field: str) -> None:
    parent = make_turn([1], [2])
    row = write(make_turn([1, 2], [3], asked=[user("a")]), parent, "call", Shared("t", 1))
    held = getattr(row, field)
    other = held + "x" if isinstance(held, str) else bytes([held[0] ^ 1]) + held[1:]
    assert replace(row, **{field: other}).checksum != row.checksum
    assert replace(row, shared=Shared("t", 2)).checksum != row.checksum
    assert replace(row, shared=None).checksum != row.checksum
