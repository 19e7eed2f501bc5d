"""The stand-in for vLLM's server, started and spoken to."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[1] / "fakes" / "vllm_server.py"


@dataclass(frozen=True)
class FakeVllm:
    url: str

    def play(self, *lines: Mapping[str, Any], loop: bool = False) -> None:
        """Answer by these lines from now on; forget what was seen, and resume."""
        self._call("/fake/script", {"lines": lines, "loop": loop})

    def seen(self, path: str = "/v1/completions") -> list[Any]:
        return [request for request in self._call("/fake/seen") if request["path"] == path]

    async def left(self) -> None:
        """Wait until a client has gone away from its request."""
        async with asyncio.timeout(10):
            while not any(request["end"] == "left" for request in await asyncio.to_thread(self.seen)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def _call(self, path: str, body: object = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data), timeout=30) as response:
            return json.load(response)


@contextmanager
def fake_vllm(*arguments: str) -> Iterator[FakeVllm]:
    process = subprocess.Popen([sys.executable, str(PROGRAM), *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield FakeVllm(json.loads(process.stdout.readline())["url"])
    finally:
        process.kill()
        process.wait(20)
        process.stdout.close()
