"""Agents that are no child processes: a coroutine in this one, or a server at a URL."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import orjson

from stenograph.agents.base import SessionHandle, visible
from stenograph.errors import AgentError, boundary
from stenograph.imports import TookTooLong, finish
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
    """Posts {"task", "base_url", "api_key"} to a URL that answers {"answer"}.

    An error status is the agent's failure; a server that cannot be reached is ours, an AgentError.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s

    def run(self, task: Task, session: SessionHandle) -> AbstractAsyncContextManager[Outcome]:
        return _outcome(self._post, task, session, self._timeout_s)

    async def _post(self, task: Task, session: SessionHandle) -> str | None:
        body = {"task": visible(task), "base_url": session.base_url, "api_key": session.api_key}
        data = orjson.dumps(body, default=str, option=orjson.OPT_NON_STR_KEYS)
        headers = {"content-type": "application/json"}
        no_timeout = aiohttp.ClientTimeout(total=None)  # the attempt's own deadline holds
        try:
            async with aiohttp.ClientSession(timeout=no_timeout) as client:
                async with client.post(self._url, data=data, headers=headers) as response:
                    text = await response.text()
        except aiohttp.ClientError as e:
            raise AgentError(f"agent.url: no answer from {self._url}: {type(e).__name__}: {e}") from e
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
    try:
        answer = _text(await finish(solve(task, session), timeout_s))
    except AgentError:
        raise
    except Exception as e:
        exit_code = None if isinstance(e, TookTooLong) else 1
        stderr = traceback.format_exc()
    seconds = time.monotonic() - started
    with boundary(AgentError, "make a folder for the outcome"):
        folder = tempfile.TemporaryDirectory(prefix="steno-agent-", ignore_cleanup_errors=True)
    with folder:
        yield Outcome(answer, exit_code, "", stderr, folder.name, seconds)


def _text(answer: Any) -> str | None:
    if answer is None or isinstance(answer, str):
        return answer
    raise TypeError(f"an agent answers a text or None, got {answer!r:.200}")
