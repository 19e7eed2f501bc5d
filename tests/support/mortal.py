"""A real gateway process that is killed again and again over one journal, and those who ask it meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from support.listening import arrived

# `steno`, over and over: each a process of its own, whose modules were loaded once for all of them. A write past the
# limit for files fails, or ends it where it stands, as a kill would at that byte.
PROGRAM = """
import os
import signal
import sys
import stenograph.engines.vllm
import stenograph.run
from stenograph.cli import main
from stenograph.config import ModelConfig
from stenograph.rendering import load_rendering
from transformers import AutoTokenizer
load_rendering(ModelConfig())
sys.argv[0] = "steno"
for line in sys.stdin:
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        print("gone", flush=True)
        continue
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if "dies" in line else signal.SIG_IGN)
    print(os.getpid(), flush=True)
    try:
        main()
    finally:
        os._exit(0)
"""


class MortalGateway:
    """`steno serve` on the database at `path` with `arguments`; `up` is set while one lives."""

    def __init__(self, path: Path, program: asyncio.subprocess.Process, http: aiohttp.ClientSession) -> None:
        self.path = path
        self.up = asyncio.Event()
        self._program = program
        self._http = http
        self._url = ""
        self._pid: int | None = None
        self._gone: asyncio.Task[str] | None = None

    async def start(self, *, dies_when_full: bool = True) -> None:
        assert self._program.stdin is not None
        self._program.stdin.write(b"dies\n" if dies_when_full else b"lives\n")
        self._pid = int(await self._line())
        self._url = json.loads(await self._line())["url"]
        resource.prlimit(self._pid, resource.RLIMIT_CORE, (0, 0))
        self._gone = asyncio.create_task(self._line())
        self.up.set()

    async def _line(self) -> str:
        assert self._program.stdout is not None
        return (await self._program.stdout.readline()).decode()

    async def live(self, chance: random.Random) -> None:
        """Let it serve, then die: at a random instant, or at a random byte of what it writes."""
        assert self._gone is not None
        if chance.random() < 0.5:
            await asyncio.sleep(chance.random() * 0.3)
        else:
            self.limit(chance.randrange(100_000))
            await asyncio.wait([self._gone], timeout=1)  # where so much is asked for
        await self.end(signal.SIGKILL)

    def limit(self, num_bytes: int) -> None:
        """Of what it may still write to its log."""
        assert self._pid is not None
        log = self.path.with_name(self.path.name + "-wal")
        most = num_bytes + (log.stat().st_size if log.exists() else 0)
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    async def end(self, how: int) -> None:
        self.up.clear()
        if self._pid is not None and self._gone is not None:
            if not self._gone.done():
                os.kill(self._pid, how)
            assert await asyncio.wait_for(self._gone, 30) == "gone\n"
            self._pid = None

    async def ask(self, path: str, body: bytes | None, key: str) -> tuple[int, bytes]:
        """Ask until an answer is whole, whichever process gives it."""
        for _ in range(60):
            await self.up.wait()
            try:
                return await self.ask_once(path, body, key)
            except (aiohttp.ClientError, ConnectionError):
                await asyncio.sleep(0.01)  # before it is known that the process has died
        raise AssertionError(f"{path} is never answered")

    async def hear(self, path: str, body: bytes, key: str) -> tuple[int, bytes, bool]:
        """Status, what arrived of the body, and whether that is all of it."""
        headers = {"authorization": f"Bearer {key}"}
        async with self._http.post(self._url + path, data=body, headers=headers) as answer:
            return await arrived(answer)

    async def get(self, path: str) -> Any:
        async with self._http.get(self._url + path, headers={"authorization": "Bearer admin"}) as answer:
            return await answer.json()

    async def ask_once(self, path: str, body: bytes | None, key: str) -> tuple[int, bytes]:
        headers = {"authorization": f"Bearer {key}"}
        async with self._http.post(self._url + path, data=body, headers=headers) as answer:
            return answer.status, await answer.read()

    async def open(self) -> Mapping[str, Any]:
        return json.loads((await self.ask("/sessions", b"{}", "admin"))[1])


@asynccontextmanager
async def mortal_gateway(path: Path, *arguments: str) -> AsyncIterator[MortalGateway]:
    serve = ("serve", "--port", "0", "--store", f"sqlite:{path}", *arguments)
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, *serve),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "STENO_ADMIN_KEY": "admin"},
    )
    assert program.stdin is not None
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
        gateway = MortalGateway(path, program, http)
        try:
            yield gateway
        finally:
            await gateway.end(signal.SIGKILL)
            program.stdin.close()
            await program.wait()
