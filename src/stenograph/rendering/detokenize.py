"""Ids to text as they arrive: the pieces joined are the text of all ids, at a cost linear in their number."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Detokenizer:
    """The bytes of each token of a byte-level tokenizer; shared by all turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    @staticmethod
    def supports(tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether a token's text depends on its bytes alone: sentence-piece decoders drop spaces by position."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        return type(getattr(backend, "decoder", None)).__name__ == "ByteLevel"

    def bytes_of(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            name = self._tokenizer.convert_ids_to_tokens(token)
            known = self._bytes[token] = _to_bytes(name) if isinstance(name, str) else b""
        return known


class TokenText:
    """One turn's incremental text; an unfinished character waits for its bytes."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._detokenizer.bytes_of(token))

    def flush(self) -> str:
        """The replacement for a character that stays unfinished."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class Trimmed:
    """Text without the white space around it, which is known to be around it only once more text comes."""

    def __init__(self) -> None:
        self.num_shown = 0  # characters
        self._space: list[str] = []

    def push(self, text: str) -> str:
        if not self.num_shown:
            text = text.lstrip()
        kept = text.rstrip()
        if not kept:
            if text:
                self._space.append(text)
            return ""
        shown = "".join([*self._space, kept])
        self._space = [text[len(kept) :]]
        self.num_shown += len(shown)
        return shown


def _alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE (GPT-2's `bytes_to_unicode`, inverted)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def _to_bytes(name: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in name)
    except KeyError:  # an added token is its own text
        return name.encode("utf-8")
