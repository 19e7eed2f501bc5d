"""Requests repeat their conversation, so what a session has sent before is known by its bytes and not read again.

What was read of it then is given again, the very same objects. The rest is read where it stands, in the body less what
is known: it is accepted, refused and told of as in the whole.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import msgspec
import numpy as np
import orjson
from msgspec import Raw
from numpy.lib.array_utils import byte_bounds

from stenograph.dialects.fields import Fields, read_body

T = TypeVar("T")

Cut = tuple[int, int, bytes]  # body[start:end], and what takes its place


_MOST_KEPT = 4  # times the items of the longest body
_LEAST_KEPT = 1024


class Seen:
    """What the bodies of one session were read to. It holds digests of them, and grows with what is new in them.

    A client that changes its whole conversation with every request would make it grow with their sum, so that it is
    emptied now and then; what comes again is read once more.
    """

    def __init__(self) -> None:
        self.items: defaultdict[type, dict[bytes, Any]] = defaultdict(dict)  # by a shape, by the digest of an item
        self.wholes: set[bytes] = set()  # digests
        self.made: dict[tuple[Any, ...], Any] = {}  # by what made it and what of
        self._longest = 0

    def make_room(self, num_items: int) -> None:
        """For a body of `num_items`."""
        self._longest = max(self._longest, num_items)
        num_held = sum(map(len, self.items.values())) + len(self.made)
        if num_held > _MOST_KEPT * self._longest + _LEAST_KEPT:
            self.items.clear()
            self.wholes.clear()
            self.made.clear()


def read_again(body: bytes, seen: Seen | None, shape: type[msgspec.Struct]) -> Fields:
    """The object that a body is; raises as `read_body` does.

    `shape` names the parts that come again: one list[Raw] item by item, each Raw as a whole; both are empty by default.
    """
    if seen is not None:
        try:
            return _split(body, seen, shape)
        except (msgspec.DecodeError, orjson.JSONDecodeError, RecursionError):
            pass  # reading it whole says what is wrong, or knows it better
    return read_body(body)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split(Fields):
    """A body less what is known: a list in `values` holds the items that are not, a whole that is known is null."""

    seen: Seen
    known: dict[bytes, Any]  # items
    items: Mapping[str, Sequence[bytes]]  # their digests
    found: list[Any]  # what the items are known as; None for those that are left in `values`
    wholes: Mapping[str, bytes]  # their digests
    cut: Mapping[str, Raw]  # wholes that are known

    def each(self, name: str, read: Callable[[Fields], T]) -> list[T]:
        if name not in self.items:
            return Fields.each(self, name, read)
        digests, found = self.items[name], self.found.copy()
        places = [i for i, made in enumerate(found) if made is None]
        fields = [self.item(name, i, value) for i, value in zip(places, self.values[name], strict=True)]
        for i, one in zip(places, fields, strict=True):
            found[i] = self.known.setdefault(digests[i], read(one))
        return found

    def whole(self, name: str, read: Callable[..., T], *also: Any) -> T:
        if name not in self.wholes:
            return Fields.whole(self, name, read, *also)
        key = (read, self.wholes[name], *also)
        made = self.seen.made.get(key)
        if made is None:
            fields = Fields({name: orjson.loads(memoryview(self.cut[name]))}) if name in self.cut else self
            made = self.seen.made[key] = Fields.whole(fields, name, read, *also)
            self.seen.wholes.add(self.wholes[name])
        return made

    def once(self, make: Callable[..., T], *of: Any) -> T:
        made = self.seen.made.get((make, *of))
        if made is None:
            made = self.seen.made[(make, *of)] = make(*of)
        return made


def _split(body: bytes, seen: Seen, shape: type[msgspec.Struct]) -> Fields:
    given = msgspec.json.decode(body, type=shape)
    parts = [getattr(given, name) for name in shape.__struct_fields__]
    seen.make_room(sum(len(part) for part in parts if isinstance(part, list)))
    known = seen.items[shape]
    items, found, wholes, cut = {}, [], {}, {}
    cuts: list[Cut] = []
    start, _ = _bounds(body)
    for name, part in zip(shape.__struct_fields__, parts, strict=True):
        if not part:
            continue  # there is none, or an empty one
        if isinstance(part, list):
            items[name] = [_digest(item) for item in part]
            # The last is left in even so: what is cut out then always ends where another item begins.
            found = [*map(known.get, items[name][:-1]), None]
            cuts += _runs(part, found, start)
        elif isinstance(part, Raw):
            wholes[name] = _digest(part)
            if wholes[name] in seen.wholes:
                cut[name] = part
                low, high = _bounds(part)
                cuts.append((low - start, high - start, b"null"))
    values = orjson.loads(_without(body, cuts))
    return _Split(values, seen=seen, known=known, items=items, found=found, wholes=wholes, cut=cut)


def _runs(items: Sequence[Raw], found: Sequence[Any], start: int) -> Iterator[Cut]:
    """The items in a row that are known, each run up to the item that follows it; `start` is the body's."""
    edges = [i for i, (one, after) in enumerate(pairwise((None, *found))) if (one is None) is not (after is None)]
    starts = [_bounds(items[i])[0] - start for i in edges]
    return ((low, high, b"") for low, high in zip(starts[::2], starts[1::2], strict=True))


def _without(body: bytes, cuts: Sequence[Cut]) -> bytes:
    kept, at = [], 0
    for start, end, instead in sorted(cuts):
        kept += [body[at:start], instead]
        at = end
    return b"".join([*kept, body[at:]])


def _bounds(part: bytes | Raw) -> tuple[int, int]:
    """Where `part` lies in memory: a Raw is a view of the body that it was found in."""
    return byte_bounds(np.frombuffer(part, np.uint8))


def _digest(part: Raw) -> bytes:
    return hashlib.blake2b(part, digest_size=16).digest()
