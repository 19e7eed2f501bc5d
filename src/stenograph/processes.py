"""Child processes in a group of their own: whatever they started ends with them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from stenograph.errors import ConfigError

GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Finished:
    """How a process ended; `exit_code` is None after a timeout."""

    exit_code: int | None
    stdout: str
    stderr: str


def resolve_command(command: Sequence[str], setting: str) -> tuple[str, ...]:
    """The command with the path of its program; `python` is the interpreter that runs us, so its packages are ours.

    Raises ConfigError naming `setting`.
    """
    if not command:
        raise ConfigError(f"{setting} is empty; give a program and its arguments")
    program = sys.executable if command[0] in ("python", "python3") else shutil.which(command[0])
    if program is None:
        raise ConfigError(f"{setting}: {command[0]!r} is not found on PATH; install it or give its path")
    return (os.path.abspath(program), *command[1:])


async def run_process(
    command: Sequence[str],
    *,
    cwd: str,
    environment: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    timeout_s: float,
    max_output_bytes: int,
) -> Finished:
    """Run a command to its end or its timeout; the last `max_output_bytes` of stdout and of stderr are kept.

    Raises OSError where it cannot be started.
    """
    async with _pipe(max_output_bytes) as (stdout, out_end), _pipe(max_output_bytes) as (stderr, err_end):
        with out_end, err_end, _file(stdin) as in_end:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=cwd,
                env=environment,
                stdin=in_end,
                stdout=out_end,
                stderr=err_end,
                start_new_session=True,
            )
        exit_code: int | None = None
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    exit_code = await process.wait()
        finally:
            await _end_group(process)
        # A process that left the group may hold the pipes open for as long as it likes; we do not wait for it.
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await stdout.ended.wait()
                await stderr.ended.wait()
    return Finished(exit_code, stdout.text(), stderr.text())


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """Ask the group to end, then make it; returns when the leader is gone."""
    try:
        if process.returncode is None:
            _signal(process.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await process.wait()
    finally:
        _signal(process.pid, signal.SIGKILL)
        await process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


class _Tail(asyncio.Protocol):
    """The last `limit` bytes of a stream. All of it is read, so that the child is never blocked."""

    def __init__(self, limit: int) -> None:
        self.ended = asyncio.Event()
        self._limit = limit
        self._kept = bytearray()
        self._dropped = 0

    def data_received(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > 2 * self._limit:  # seldom, so that a byte is moved once
            self._trim()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()

    def text(self) -> str:
        self._trim()
        text = self._kept.decode(errors="replace")
        return f"[{self._dropped} bytes before this were left out]\n{text}" if self._dropped else text

    def _trim(self) -> None:
        surplus = max(len(self._kept) - self._limit, 0)
        del self._kept[:surplus]
        self._dropped += surplus


@asynccontextmanager
async def _pipe(limit: int) -> AsyncIterator[tuple[_Tail, IO[bytes]]]:
    """A pipe that is read here, and the end that a child writes to: ours must close before the child's can end it."""
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "wb", buffering=0) as writing:
        loop = asyncio.get_running_loop()
        transport, tail = await loop.connect_read_pipe(lambda: _Tail(limit), os.fdopen(read_end, "rb", buffering=0))
        try:
            yield tail, writing
        finally:
            transport.close()


@contextmanager
def _file(content: bytes | None) -> Iterator[IO[bytes] | int]:
    """What a child reads as stdin: a file has no buffer that fills up while the child does not read."""
    if content is None:
        yield asyncio.subprocess.DEVNULL
        return
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file
