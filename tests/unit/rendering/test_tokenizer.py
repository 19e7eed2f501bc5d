"""A tokenizer by its core alone encodes and decodes as transformers does."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from stenograph.rendering import builtin_tokenizer
from stenograph.rendering.tokenizer import PlainTokenizer, plain_tokenizer
from stenograph.types import Conversation, Message, Tool
from support.tokenizers import FAMILY_TOKENS, any_family, pieces_tokenizer

TOKENIZERS = {"bytes": builtin_tokenizer(), "pieces": pieces_tokenizer()}
PIECES = st.sampled_from(["<|im_start|>", "<think>", "assistant\n", " ", "\n\n", "é", "☂", "word " * 20, "<|im"])
TEXTS = st.lists(PIECES | st.text(max_size=8), max_size=8).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
def test_ids_and_text_are_those_of_transformers(name: str, text: str) -> None:
    theirs, plain = TOKENIZERS[name], plain_tokenizer(TOKENIZERS[name])
    assert isinstance(plain, PlainTokenizer)
    ids = theirs.encode(text, add_special_tokens=False)
    assert plain.encode(text) == plain.encode(text) == ids
    assert plain.decode(ids) == theirs.decode(ids)


def test_a_text_is_neither_cut_nor_padded_as_a_saved_tokenizer_would() -> None:
    theirs = builtin_tokenizer()
    core: Any = theirs.backend_tokenizer
    core.enable_truncation(max_length=4)
    core.enable_padding(length=16)
    plain = plain_tokenizer(theirs)
    assert plain.decode(plain.encode("six ids")) == "six ids"
    assert plain.decode(plain.encode("word " * 20)) == "word " * 20


@pytest.mark.parametrize("name", FAMILY_TOKENS)
def test_a_prompt_costs_in_proportion_to_its_length(name: str) -> None:
    rendering = any_family(name)

    def seconds(num_words: int) -> float:
        text = "word " * num_words + "☂"  # no token is this character by itself
        asked = Conversation((Message("system", text), Message("user", text)), (Tool("calc", text, {}),))
        start = time.process_time()
        rendering.render(asked)
        return time.process_time() - start

    assert min(seconds(1600) for _ in range(3)) < 10 * min(seconds(400) for _ in range(3))


def test_what_is_remembered_is_not_shared() -> None:
    plain = plain_tokenizer(builtin_tokenizer())
    plain.encode("\n").append(7)
    assert 7 not in plain.encode("\n")


def test_markers_that_there_are_not_have_the_id_that_transformers_gives_them() -> None:
    theirs, plain = TOKENIZERS["bytes"], plain_tokenizer(TOKENIZERS["bytes"])
    for marker in ("<think>", "<nothing>"):
        assert plain.convert_tokens_to_ids(marker) == theirs.convert_tokens_to_ids(marker)


class Shouting(PreTrainedTokenizerFast):
    def _encode_plus(self, text: str, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        return super()._encode_plus(text.upper(), *args, **kwargs)  # type: ignore[arg-type]


def test_a_tokenizer_that_does_more_than_its_core_stays_itself() -> None:
    shouting = Shouting(tokenizer_object=builtin_tokenizer().backend_tokenizer)
    assert plain_tokenizer(shouting) is shouting
    cleaning = PreTrainedTokenizerFast(
        tokenizer_object=builtin_tokenizer().backend_tokenizer, clean_up_tokenization_spaces=True
    )
    assert plain_tokenizer(cleaning) is cleaning
