"""Agent programs as child processes: a folder and a process group of their own, both gone when the attempt ends."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import orjson

from stenograph.agents.base import SessionHandle, addresses, visible
from stenograph.config import AgentConfig
from stenograph.errors import AgentError, boundary
from stenograph.processes import run_process
from stenograph.types import Outcome, Task


class CommandAgent:
    """Runs `command` with the session's addresses and keys in its environment."""

    def __init__(self, command: tuple[str, ...], config: AgentConfig) -> None:
        self._command = command
        self._config = config

    def run(self, task: Task, session: SessionHandle) -> AbstractAsyncContextManager[Outcome]:
        return self._run(task, session)

    @asynccontextmanager
    async def _run(self, task: Task, session: SessionHandle) -> AsyncIterator[Outcome]:
        with boundary(AgentError, "make a folder for the agent"):
            folder = tempfile.TemporaryDirectory(prefix="steno-agent-", ignore_cleanup_errors=True)
        with folder:
            yield await self._attempt(task, session, Path(folder.name))

    async def _attempt(self, task: Task, session: SessionHandle, folder: Path) -> Outcome:
        workdir, answer_path, task_path = folder / "work", folder / "answer", folder / "task.json"
        with boundary(AgentError, f"run {self._command[0]}"):
            workdir.mkdir()
            task_path.write_bytes(orjson.dumps(visible(task), default=str, option=orjson.OPT_NON_STR_KEYS))
            started = time.monotonic()
            done = await run_process(
                [argument.replace("{prompt}", task.prompt) for argument in self._command],
                cwd=str(workdir),
                environment=self._environment(session, task_path, answer_path),
                timeout_s=self._config.timeout_s,
                max_output_bytes=self._config.max_output_bytes,
            )
            seconds = time.monotonic() - started
            answer = await asyncio.to_thread(_answer, answer_path, done.stdout, self._config.max_output_bytes)
        return Outcome(answer, done.exit_code, done.stdout, done.stderr, str(workdir), seconds)

    def _environment(self, session: SessionHandle, task_path: Path, answer_path: Path) -> dict[str, str]:
        kept = {name: os.environ[name] for name in self._config.environment if name in os.environ}
        return kept | addresses(session) | {"STENO_TASK": str(task_path), "STENO_ANSWER": str(answer_path)}


def _answer(path: Path, stdout: str, limit: int) -> str | None:
    """The answer's file if the agent wrote it, else the last line that it printed."""
    if path.is_file():
        with path.open("rb") as file:
            return file.read(limit).decode(errors="replace")
    lines = [line for line in stdout.split("\n") if line.strip()]  # str.splitlines cuts at U+2028 and others too
    return lines[-1].strip() if lines else None
