"""Ids to text as they arrive: the pieces joined are the text of all ids, at a cost linear in their number."""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_LEVEL = "ByteLevel"
# How Gemma's tokenizers decode: pieces as they are, with bytes between them for what no piece spells.
_PIECES = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """What each token of a tokenizer stands for; shared by all turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self.in_pieces = _decoder(tokenizer) != _BYTE_LEVEL

    @staticmethod
    def supports(tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether a token's text does not depend on where it stands: some decoders drop a space at the start."""
        return _decoder(tokenizer) in (_BYTE_LEVEL, _PIECES)

    def bytes_of(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            name = self._tokenizer.convert_ids_to_tokens(token)
            known = self._bytes[token] = self._to_bytes(name) if isinstance(name, str) else b""
        return known

    def byte_of(self, token: int) -> int | None:
        """The byte that a token is in a tokenizer of pieces; None for a piece."""
        found = _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token)))
        return int(found[1], 16) if found else None

    def _to_bytes(self, name: str) -> bytes:
        return name.replace("▁", " ").encode() if self.in_pieces else _from_alphabet(name)


class TokenText:
    """One turn's incremental text; an unfinished character waits for its bytes."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()  # bytes between pieces: all are replaced where they are no text as a whole

    def push(self, token: int) -> str:
        if not self._detokenizer.in_pieces:
            return self._decoder.decode(self._detokenizer.bytes_of(token))
        byte = self._detokenizer.byte_of(token)
        if byte is not None:
            self._run.append(byte)
            return ""
        return self.flush() + self._detokenizer.bytes_of(token).decode()

    def flush(self) -> str:
        """What waits, with a replacement for a character that stays unfinished."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        try:
            rest += self._run.decode()
        except UnicodeDecodeError:
            rest += "\ufffd" * len(self._run)
        self._run.clear()
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


def _from_alphabet(name: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in name)
    except KeyError:  # an added token is its own text
        return name.encode("utf-8")


def _decoder(tokenizer: PreTrainedTokenizerBase) -> object:
    """The type of a tokenizer's decoder, or the list of those that it chains; None where it has none to be seen."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else state["type"]
