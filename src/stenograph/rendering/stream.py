"""Incremental reading of sampled ids: whatever was shown is a prefix of what the whole turn parses to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stenograph.rendering.base import Delta
from stenograph.types import Ids, Reply


class BufferedStream:
    """Shows nothing before the end: for formats whose text cannot be told from markup while it arrives."""

    def __init__(self, parse: Callable[[Ids], Reply]) -> None:
        self._parse = parse
        self._ids: list[Ids] = []

    def feed(self, ids: Ids) -> Delta:
        self._ids.append(ids)
        return Delta()

    def finish(self) -> Delta:
        reply = self._parse(np.concatenate(self._ids) if self._ids else np.zeros(0, np.int32))
        return Delta(reply.content, reply.reasoning)
