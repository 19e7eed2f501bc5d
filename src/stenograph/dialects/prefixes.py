"""Bodies that begin with the same bytes, up to where an item of a list begins, hold the same items before it.

A conversation that was gone on with is so known by one hash, however many messages it has; no body is kept for it.
What its items were made to is gone on with too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

_MOST_KEPT = 64
NUM_ENDS = 4  # of one body: clients change the last messages when they send them again
_TAIL = 64  # bytes


@dataclass(frozen=True, slots=True)
class Made:
    """The first `num_items` of a list: most of them were made to `built`, which nobody changes, `then` are the rest."""

    num_items: int = 0
    built: Any = None
    then: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """What a body begins with that is known: none of it, or the items that `made` is of.

    At `start` their list's first item begins, at `end` another one may: `body[:start] + body[end:]` is the body less
    these items. Where that holds an item at `start`, it is JSON if and only if the body is.
    """

    start: int = 0
    end: int = 0
    made: Made = Made()
    hashed: Any = field(default_factory=hashlib.sha256)  # of body[:end]; processors have instructions for this one


@dataclass(frozen=True, slots=True)
class _Prefix:
    """The items that `made` is of stand in `body[:end]`, which ends in `tail`."""

    start: int
    end: int
    tail: bytes
    made: Made


class Prefixes:
    """Where the bodies that came last may be gone on with, of several conversations at the same time."""

    def __init__(self) -> None:
        self._recent: dict[bytes, _Prefix] = {}  # by the hash of body[:end]; what was used last is last

    def find(self, body: bytes) -> Begun:
        """The longest that `body` begins with. It is hashed once, and no further than it is likely to be known."""
        ends = (one.end for one in reversed(self._recent.values()) if body.endswith(one.tail, 0, one.end))
        hashed, at, view = hashlib.sha256(), 0, memoryview(body)
        found, digest = None, b""
        for end in sorted(islice(ends, NUM_ENDS)):
            hashed.update(view[at:end])
            at = end
            if hashed.digest() in self._recent:
                found, digest = hashed.copy(), hashed.digest()
        if found is None:
            return Begun()
        one = self._recent[digest] = self._recent.pop(digest)
        return Begun(one.start, one.end, one.made, found)

    def keep(self, body: bytes, begun: Begun, start: int, ends: Sequence[int], made: Made) -> None:
        """Keep what the list in `body` was made to: `ends` are where the items that are `then` begin, in order."""
        hashed, at, view = begun.hashed.copy(), begun.end, memoryview(body)
        for num_then, end in enumerate(ends):
            hashed.update(view[at:end])
            at = end
            tail = body[max(end - _TAIL, 0) : end]
            before = Made(made.num_items - len(ends) + num_then, made.built, made.then[:num_then])
            self._recent[hashed.digest()] = _Prefix(start, end, tail, before)
        for digest in list(self._recent)[:-_MOST_KEPT]:
            del self._recent[digest]
