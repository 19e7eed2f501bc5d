"""The one composition root: a gateway alone, or a gateway, agents and a trainer around one engine."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from stenograph.config import Config
from stenograph.engines.base import Engine
from stenograph.gateway.server import Gateway, new_admin_key
from stenograph.rendering import Rendering, load_rendering
from stenograph.traces.memory import MemoryTraceStore


async def serve(config: Config, ready: asyncio.Future[Gateway]) -> None:
    """Run a gateway until SIGINT or SIGTERM; `ready` gets it when it listens."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stopped.set)
    rendering = load_rendering(config.model)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(_serving_engine(config, rendering))
        gateway = await stack.enter_async_context(_listening(config, engine, rendering))
        ready.set_result(gateway)
        await stopped.wait()


@asynccontextmanager
async def _serving_engine(config: Config, rendering: Rendering) -> AsyncIterator[Engine]:
    engine = build_engine(config, rendering)
    try:
        yield engine
    finally:
        await engine.aclose()


@asynccontextmanager
async def _listening(config: Config, engine: Engine, rendering: Rendering) -> AsyncIterator[Gateway]:
    gateway = Gateway(config, engine, rendering, MemoryTraceStore(), new_admin_key(), config.model.path or "stenograph")
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


def build_engine(config: Config, rendering: Rendering) -> Engine:
    """An engine of its own weights, as `serve` needs it."""
    if config.engine.kind == "scripted":
        from stenograph.engines.scripted import ScriptedEngine, load_script

        assert config.engine.script is not None  # the config's validator saw to it
        lines = load_script(config.engine.script, rendering)
        return ScriptedEngine(lines, context_length=config.engine.context_length or 1_000_000)
    raise AssertionError("local engine")
