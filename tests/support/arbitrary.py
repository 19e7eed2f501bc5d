"""JSON of any shape, out of the words that a protocol knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st


def values(names: Sequence[str], texts: Sequence[str] = ()) -> st.SearchStrategy[Any]:
    """Nested values; `names` are fields and texts, `texts` texts alone."""
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    return st.recursive(
        leaves | st.sampled_from([*names, *texts]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(names), inner, max_size=4),
        max_leaves=10,
    )


def objects(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with any of `fields`."""
    return st.fixed_dictionaries({}, optional=fields)
