"""What an engine sends is recorded as it is, or refused."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import numpy as np
import pytest

from stenograph.config import Config
from stenograph.engines.base import Chunk, Generate
from stenograph.engines.scripted import ScriptedEngine
from stenograph.errors import EngineError
from stenograph.gateway.sessions import Sessions
from stenograph.gateway.turns import Turns
from stenograph.traces.memory import MemoryTraceStore
from support.listening import new_call, rendering


class Unsound(ScriptedEngine):
    def __init__(self, logprob: float) -> None:
        super().__init__([])
        self._logprob = logprob

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        yield Chunk(np.array([65], np.int32), np.array([self._logprob], np.float32), 0, "stop")


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
async def test_a_logprob_that_is_no_number_is_not_recorded(logprob: float) -> None:
    store = MemoryTraceStore()
    session = Sessions(store, admin_key="admin", require_keys=True, ttl_s=60).open(traced=True, ttl_s=None, metadata={})
    turns = Turns(Unsound(logprob), rendering(), store, Config())
    call = new_call("hello")
    await turns.take(session, call)
    assert isinstance(call.error, EngineError)
    assert "logprob" in str(call.error)
    assert store.get(session.id).num_turns == 0
