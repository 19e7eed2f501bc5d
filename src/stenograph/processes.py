"""Child processes in a group of their own: whatever they started ends with them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Finished:
    """How a process ended; `exit_code` is None after a timeout."""

    exit_code: int | None
    stdout: str
    stderr: str


async def run_process(
    command: Sequence[str],
    *,
    cwd: str,
    environment: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    timeout_s: float,
    max_output_bytes: int,
) -> Finished:
    """Run a command to its end or its timeout; stdout and stderr are kept up to `max_output_bytes` each.

    Raises OSError where it cannot be started.
    """
    async with _group(command, cwd, environment, stdin is not None) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        stdout = asyncio.create_task(_read(process.stdout, max_output_bytes))
        stderr = asyncio.create_task(_read(process.stderr, max_output_bytes))
        fed = asyncio.create_task(_feed(process, stdin))
        exit_code: int | None = None
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    exit_code = await process.wait()
        finally:
            # A grandchild may hold the pipes open; they close when the group ends.
            await _end_group(process)
            await asyncio.wait([stdout, stderr, fed])
        return Finished(exit_code, stdout.result(), stderr.result())


@asynccontextmanager
async def _group(
    command: Sequence[str], cwd: str, environment: Mapping[str, str] | None, with_stdin: bool
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env=environment,
        stdin=asyncio.subprocess.PIPE if with_stdin else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        await _end_group(process)


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """Ask the group to end, then make it; returns when the leader is gone."""
    if process.returncode is None:
        _signal(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await process.wait()
    _signal(process.pid, signal.SIGKILL)
    await process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


async def _read(stream: asyncio.StreamReader, limit: int) -> str:
    """Everything up to `limit` bytes; the rest is read and dropped, so that the child is never blocked."""
    kept, dropped = bytearray(), 0
    while data := await stream.read(65536):
        room = limit - len(kept)
        kept += data[:room]
        dropped += max(len(data) - room, 0)
    text = kept.decode(errors="replace")
    return text + f"\n[{dropped} bytes more were left out]" if dropped else text


async def _feed(process: asyncio.subprocess.Process, stdin: bytes | None) -> None:
    if stdin is None or process.stdin is None:
        return
    with suppress(ConnectionError):
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()
    with suppress(ConnectionError):
        await process.stdin.wait_closed()
