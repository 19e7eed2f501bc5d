"""Payloads of opaque bytes, and what is there of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stenograph.engines.base import Chunk, Generate
from stenograph.engines.scripted import ScriptedEngine
from stenograph.errors import TraceError
from stenograph.traces.payloads import Holder, MemoryPayloads, Payloads
from stenograph.types import Ids, Payload


def opaque(said: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(said, np.uint8)


def is_there(payloads: Payloads, payload: Payload) -> bool:
    try:
        payloads.get(payload)
    except TraceError:
        return False
    return True


class Watched(MemoryPayloads):
    """Payloads in memory that know what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Payload] = []

    def put(self, value: NDArray[Any], holder: Holder) -> Payload:
        self.made.append(super().put(value, holder))
        return self.made[-1]

    def left(self) -> list[Payload]:
        return [payload for payload in self.made if is_there(self, payload)]


class RoutedEngine(ScriptedEngine):
    """A script whose tokens come with an opaque byte each, as if a mixture of experts had made them."""

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        async for chunk in super().generate(request):
            yield replace(chunk, experts=byte_of(chunk.ids))


def byte_of(ids: Ids) -> NDArray[np.uint8]:
    return (ids % 251 + 1).astype(np.uint8)
