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

from stenograph.dialects.fields import Fields, Growing, read_body
from stenograph.dialects.prefixes import NUM_ENDS, Begun, Made, Prefixes

T = TypeVar("T")
G = TypeVar("G", bound=Growing)

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
        self.prefixes: defaultdict[type, Prefixes] = defaultdict(Prefixes)  # by a shape; of what is among `items`
        self.wholes: set[bytes] = set()  # digests
        self.made: dict[tuple[Any, ...], Any] = {}  # by what made it and what of
        self._longest = 0

    def begun(self, body: bytes, shape: type[msgspec.Struct]) -> Begun:
        """What of `body` is known by how it begins."""
        num_held = sum(map(len, self.items.values())) + len(self.made)
        if num_held > _MOST_KEPT * self._longest + _LEAST_KEPT:
            self.items.clear()
            self.prefixes.clear()
            self.wholes.clear()
            self.made.clear()
        return self.prefixes[shape].find(body)

    def keep(self, body: bytes, shape: type[msgspec.Struct], read: _List, made: Made) -> None:
        """`made` is what all of the list in `body` was made to."""
        self._longest = max(self._longest, made.num_items)
        self.prefixes[shape].keep(body, read.begun, read.start, read.ends, made)


def read_again(body: bytes, seen: Seen | None, shape: type[msgspec.Struct]) -> Fields:
    """The object that a body is; raises as `read_body` does.

    `shape` names the parts that come again: one list[Raw] item by item, each Raw as a whole; both are empty by default.
    """
    if seen is not None:
        try:
            return _split(body, seen.begun(body, shape), seen, shape)
        except (msgspec.DecodeError, orjson.JSONDecodeError, RecursionError):
            pass  # reading it whole says what is wrong, or knows it better
    return read_body(body)


@dataclass(frozen=True, slots=True)
class _List:
    """A list: the items that `begun` knows, then some that are known by their digests, and those that are not.

    `start` and `ends` are where in the body its first item and the last few begin.
    """

    begun: Begun
    digests: Sequence[bytes]
    found: Sequence[Any]  # what these items are known as; None for those that are left in the body
    start: int
    ends: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split(Fields):
    """A body less what is known: a list in `values` holds the items that are not, a whole that is known is null."""

    body: bytes
    seen: Seen
    shape: type[msgspec.Struct]
    lists: Mapping[str, _List]
    wholes: Mapping[str, bytes]  # their digests
    cut: Mapping[str, Raw]  # wholes that are known

    def fold(self, name: str, read: Callable[[Fields], T], begin: Callable[[], G], add: Callable[[G, T], object]) -> G:
        if name not in self.lists:
            return Fields.fold(self, name, read, begin, add)
        listed = self.lists[name]
        begun, items = listed.begun.made, self._items(name, listed, read)
        num_first = len(items) - len(listed.ends)
        built = begin() if begun.built is None else begun.built.copy()
        for item in (*begun.then, *items[:num_first]):
            add(built, item)
        then = tuple(items[num_first:])
        self.seen.keep(self.body, self.shape, listed, Made(begun.num_items + len(items), built.copy(), then))
        for item in then:
            add(built, item)
        return built

    def _items(self, name: str, listed: _List, read: Callable[[Fields], T]) -> list[T]:
        """What `read` makes, or made, of the items after those that the list began with."""
        found, known = [*listed.found], self.seen.items[self.shape]
        places = [i for i, made in enumerate(found) if made is None]
        values = zip(places, self.values[name], strict=True)
        fields = [self.item(name, listed.begun.made.num_items + i, value) for i, value in values]
        for i, one in zip(places, fields, strict=True):
            found[i] = known.setdefault(listed.digests[i], read(one))
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


def _split(body: bytes, begun: Begun, seen: Seen, shape: type[msgspec.Struct]) -> Fields:
    rest = body[: begun.start] + body[begun.end :]
    given = msgspec.json.decode(rest, type=shape)
    origin = _address(rest)
    lists, wholes, cut = {}, {}, {}
    cuts: list[Cut] = []
    for name in shape.__struct_fields__:
        part = getattr(given, name)
        if not part:
            continue  # there is none, or an empty one
        if isinstance(part, list):
            digests = [_digest(item) for item in part]
            # The last is left in even so: what is cut out then always ends where another item begins.
            found = [*map(seen.items[shape].get, digests[:-1]), None]
            cuts += _runs(part, found, origin)
            start, *ends = (_address(item) - origin for item in (part[0], *part[1:][-NUM_ENDS:]))
            ends = [end + begun.end - begun.start for end in ends]
            lists[name] = _List(begun, digests, found, start, ends)
        elif isinstance(part, Raw):
            wholes[name] = _digest(part)
            if wholes[name] in seen.wholes:
                cut[name] = part
                at = _address(part) - origin
                cuts.append((at, at + len(memoryview(part)), b"null"))
    if begun.made.num_items and begun.start not in [one.start for one in lists.values()]:
        return _split(body, Begun(), seen, shape)  # a later list takes the place of the one that was begun
    values = orjson.loads(_without(rest, cuts))
    return _Split(values, body=body, seen=seen, shape=shape, lists=lists, wholes=wholes, cut=cut)


def _runs(items: Sequence[Raw], found: Sequence[Any], origin: int) -> Iterator[Cut]:
    """The items in a row that are known, each run up to the item that follows it; `origin` is the body's address."""
    edges = [i for i, (one, after) in enumerate(pairwise((None, *found))) if (one is None) is not (after is None)]
    starts = [_address(items[i]) - origin for i in edges]
    return ((low, high, b"") for low, high in zip(starts[::2], starts[1::2], strict=True))


def _without(body: bytes, cuts: Sequence[Cut]) -> bytes:
    kept, at = [], 0
    for start, end, instead in sorted(cuts):
        kept += [body[at:start], instead]
        at = end
    return b"".join([*kept, body[at:]])


def _address(part: bytes | Raw) -> int:
    """Where `part` lies in memory: a Raw is a view of the body that it was found in."""
    return np.frombuffer(part, np.uint8).ctypes.data


def _digest(part: Raw) -> bytes:
    return hashlib.sha256(part).digest()
