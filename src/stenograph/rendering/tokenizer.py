"""Tokenizers from a config: one object that every part of a run shares, found without importing torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stenograph.config import ModelConfig
from stenograph.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
            "give a folder with tokenizer.json or a hub name"
        ) from e
