"""A seal gives back what was put in; nothing else is taken for one."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.dialects.minted import Sealed, call_id, seal, turn_id, turn_of_call, unseal

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))  # a lone surrogate is no text that ids decode to


@given(TEXTS, TEXTS)
def test_what_is_sealed_comes_back(turn: str, reasoning: str) -> None:
    assert unseal(seal(turn, reasoning)) == Sealed(turn, reasoning)


@given(st.text() | st.text("ABCxyz019-_=").map(lambda text: seal("", "")[:8] + text))
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert isinstance(unseal(text), Sealed | None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "c2lnbmF0dXJlLWZha2U=",
        "\ud800",
        seal("a", "b")[:-4],
        seal("a", "b")[:8] + "é",
        seal("a", "b") + "!",
        base64.urlsafe_b64encode(b'steno1["a"]').decode(),
        base64.urlsafe_b64encode(b"steno1[1, 2]").decode(),
        base64.urlsafe_b64encode(b'steno2["a", "b"]').decode(),
    ],
)
def test_what_is_not_ours_or_not_whole_is_none(text: str) -> None:
    assert unseal(text) is None


def test_ids_of_calls_name_their_turn() -> None:
    for name in ("0123456789abcdef", "0123456789abcdef_2"):
        assert turn_of_call(call_id(name, 10)) == turn_id(name)
    for other in ("", "call_1", "call_0123456789abcdef", "toolu_0123456789abcdef_0", "call_0123456789ABCDEF_0"):
        assert turn_of_call(other) is None
