"""Whether processes that a test did not start itself are still there."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path


def alive(pid: int) -> bool:
    """A zombie is dead: only its parent has not looked yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def there(path: str | Path) -> bool:
    return os.path.exists(path)


async def gone(pid: int, timeout_s: float = 5.0) -> bool:
    """Whether the process ends within `timeout_s`; it is killed if not."""
    for _ in range(int(timeout_s / 0.02)):
        if not alive(pid):
            return True
        await asyncio.sleep(0.02)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return False


async def written(path: Path, timeout_s: float = 10.0) -> str:
    """The text of a file, once a process has written a whole line to it."""
    for _ in range(int(timeout_s / 0.02)):
        if there(path) and (text := _read(path)).endswith("\n"):
            return text
        await asyncio.sleep(0.02)
    raise AssertionError(f"{path} was not written within {timeout_s} s")


def _read(path: Path) -> str:
    return path.read_text()
