"""Agents that are no child processes: a coroutine in this one, or a server at a URL."""

from __future__ import annotations

import asyncio
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict

import aiohttp
import orjson

from stenograph.agents.base import SessionHandle
from stenograph.types import Outcome, Task

Solve = Callable[[Task, SessionHandle], Awaitable[str | None]]


class CallableAgent:
    """Awaits `async def agent(task, session) -> answer`."""

    def __init__(self, solve: Solve, timeout_s: float) -> None:
        self._solve = solve
        self._timeout_s = timeout_s

    def run(self, task: Task, session: SessionHandle) -> AbstractAsyncContextManager[Outcome]:
        return _outcome(self._solve, task, session, self._timeout_s)


class UrlAgent:
    """Posts {"task", "base_url", "api_key"} to a URL that answers {"answer"}."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s

    def run(self, task: Task, session: SessionHandle) -> AbstractAsyncContextManager[Outcome]:
        return _outcome(self._post, task, session, self._timeout_s)

    async def _post(self, task: Task, session: SessionHandle) -> str | None:
        body = {"task": asdict(task), "base_url": session.base_url, "api_key": session.api_key}
        headers = {"content-type": "application/json"}
        async with aiohttp.ClientSession() as client:
            async with client.post(self._url, data=orjson.dumps(body, default=str), headers=headers) as response:
                text = await response.text()
                if response.status >= 400:
                    raise RuntimeError(f"{self._url} answered {response.status}: {text[:300]}")
        return orjson.loads(text)["answer"]


@asynccontextmanager
async def _outcome(solve: Solve, task: Task, session: SessionHandle, timeout_s: float) -> AsyncIterator[Outcome]:
    """What `solve` came to; its failure is data, as a process's would be."""
    started = time.monotonic()
    answer: str | None = None
    exit_code: int | None = 0
    stderr = ""
    # Only the deadline's own expiry counts as the timeout: the agent may raise a TimeoutError of its own.
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            answer = await solve(task, session)
    except Exception:
        exit_code = None if deadline.expired() else 1
        stderr = traceback.format_exc()
    with tempfile.TemporaryDirectory(prefix="steno-agent-") as workdir:
        yield Outcome(answer, exit_code, "", stderr, workdir, time.monotonic() - started)
