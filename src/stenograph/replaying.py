"""Replays one session of a run: the same agent gets the same answers, and the first request that differs is told."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stenograph.agents.base import SessionHandle, addresses
from stenograph.config import Config
from stenograph.engines.replay import ReplayEngine
from stenograph.errors import AgentError, ConfigError, boundary
from stenograph.gateway.server import Gateway, new_admin_key
from stenograph.processes import GRACE_S
from stenograph.rendering import load_rendering
from stenograph.traces.drift import Drift
from stenograph.traces.memory import MemoryTraceStore
from stenograph.traces.session import SessionRecord

_CONTEXT_LENGTH = 10_000_000  # what was recorded had room


@dataclass(frozen=True, slots=True)
class Replayed:
    """How a replay went. `repeated` answers are those that were asked for more often than they were recorded.

    `cut` ones were asked for with fewer tokens than they have, `missed` ones not at all, though an agent once had them.
    `exit_code` is that of the agent that was run.
    """

    replayed: int
    recorded: int
    missed: int
    repeated: int
    cut: int
    difference: Drift | None
    exit_code: int | None = None


async def replay(
    config: Config,
    record: SessionRecord,
    port: int,
    listening: Callable[[Gateway, SessionHandle], None],
    differs: Callable[[Drift], None],
    command: Sequence[str] = (),
) -> Replayed:
    """Serve `record`, by the config that it was recorded with, until `command` ends, or else SIGINT or SIGTERM comes.

    `listening` is told the session that an agent may use at once, `differs` the first request that is not recorded.
    Raises ConfigError where there is nothing to replay.
    """
    if not record.tree.turns:
        raise ConfigError(f"session {record.id} has no recorded turn to replay; choose another")
    found: list[Drift] = []

    def differ(drift: Drift) -> None:
        found.append(drift)
        if len(found) == 1:
            differs(drift)

    engine = ReplayEngine(record, differ, context_length=config.engine.context_length or _CONTEXT_LENGTH)
    settings = config.gateway.model_copy(update={"port": port, "public_url": None})
    # No agent sees routed experts, and they are freed with their session.
    unrouted = config.engine.model_copy(update={"experts": False})
    gateway = Gateway(
        config.model_copy(update={"gateway": settings, "engine": unrouted}),
        engine,
        load_rendering(config.model),
        MemoryTraceStore(record.allowed),
        new_admin_key(),
        config.model.path or "stenograph",
        engine.names,
    )
    stopped = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stopped.set)
    await gateway.start()
    try:
        opened = gateway.sessions.open(traced=True, ttl_s=math.inf, metadata=record.opening.metadata)
        session = SessionHandle(opened.id, f"{gateway.url}/s/{opened.id}", opened.api_key, gateway.model_name)
        listening(gateway, session)
        exit_code = await _run(command, session, stopped) if command else None
        if not command:
            await stopped.wait()
    finally:
        await gateway.stop()
        await engine.aclose()
    tree = record.tree
    missed = [turn for turn in tree.turns if tree.state(turn) == "delivered" and turn not in engine.replayed]
    counted = len(engine.replayed), len(tree.turns), len(missed), engine.num_repeated, engine.num_cut
    return Replayed(*counted, found[0] if found else None, exit_code)


async def _run(command: Sequence[str], session: SessionHandle, stopped: asyncio.Event) -> int:
    """Run an agent where we are, until it ends or is to. What it prints goes to stderr: stdout is for data."""
    with boundary(AgentError, f"run {command[0]}"):
        process = await asyncio.create_subprocess_exec(
            *command, env=os.environ | addresses(session), stdout=sys.stderr.fileno()
        )
    ends, stops = asyncio.ensure_future(process.wait()), asyncio.ensure_future(stopped.wait())
    await asyncio.wait((ends, stops), return_when=asyncio.FIRST_COMPLETED)
    stops.cancel()
    if not ends.done():
        process.terminate()
        await asyncio.wait((ends,), timeout=GRACE_S)
    if not ends.done():
        process.kill()
    return await ends
