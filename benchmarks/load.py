"""The load on a gateway: sessions of a given length, turn after turn; one line of JSON tells what was measured.

Texts are made and requests written before a request's clock starts, answers are read after it has stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import numpy as np
import orjson
import uvloop

NUM_USER = 130  # tokens of a user's message
NUM_TURN = 200  # tokens that a turn adds: a user's message, a reply, and what stands around them
END = b"data: [DONE]\n\n"  # of a stream
# A token each.
WORDS = [a + b + c for a in ("ba", "ke", "mi", "tr") for b in ("la", "f", "do", "v") for c in "abcdefgh"]


@dataclass(frozen=True, slots=True)
class Plan:
    """`num_tokens` of a session in the middle of what is measured; each of `rounds` opens `concurrency` sessions.

    `num_measured` turns of a session are, after `num_taken` that are not; what is longer begins with a history.
    """

    num_tokens: int
    concurrency: int
    stream: bool
    rounds: int
    num_measured: int
    num_taken: int = 40


class Refused(Exception):
    """A turn that was not answered, or not to its end."""


class Client:
    """One agent: it sends its whole conversation with every turn."""

    def __init__(self, http: aiohttp.ClientSession, url: str, headers: dict[str, str], plan: Plan, seed: int) -> None:
        self._http, self._url, self._headers, self._plan = http, url, headers, plan
        self._rng = np.random.default_rng(seed)
        self._said: list[bytes] = []

    async def grow(self) -> None:
        """Take turns until what is measured stands around the plan's length."""
        num_turns = self._plan.num_tokens // NUM_TURN - self._plan.num_measured // 2
        while len(self._said) < 2 * (num_turns - self._plan.num_taken):
            self._say("user", self._text(NUM_USER))
            self._say("assistant", self._text(NUM_TURN - NUM_USER - 10))
        while len(self._said) < 2 * num_turns:
            await self.take()

    async def take(self) -> float:
        """Take a turn; the seconds from the request's first byte to the answer's last."""
        self._say("user", self._text(NUM_USER))
        head = b'{"model":"m","stream":' + (b"true" if self._plan.stream else b"false") + b',"messages":['
        body = head + b",".join(self._said) + b"]}"
        start = time.perf_counter()
        async with self._http.post(self._url, data=body, headers=self._headers) as answer:
            data = await answer.read()
        seconds = time.perf_counter() - start
        if answer.status != 200 or (self._plan.stream and not data.endswith(END)):
            raise Refused(f"{answer.status}: {data[:500]!r}")
        self._say("assistant", _content(data, self._plan.stream))
        return seconds

    def _say(self, role: str, content: str) -> None:
        self._said.append(orjson.dumps({"role": role, "content": content}))

    def _text(self, num_tokens: int) -> str:
        return " ".join(WORDS[i] for i in self._rng.integers(0, len(WORDS), num_tokens))


def _content(data: bytes, stream: bool) -> str:
    if not stream:
        return orjson.loads(data)["choices"][0]["message"]["content"]
    events = [orjson.loads(line[6:]) for line in data.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


class Direct:
    """The same load without a gateway: a prompt of the same length, by its ids, to the engine itself."""

    def __init__(self, http: aiohttp.ClientSession, url: str, plan: Plan, seed: int) -> None:
        ids = np.random.default_rng(seed).integers(100_000, 100_500, plan.num_tokens).tolist()
        self._http, self._url = http, url
        self._body = orjson.dumps({"model": "fake", "prompt": ids, "max_tokens": 4096, "stream": True})

    async def grow(self) -> None:
        """There is no session to grow."""

    async def take(self) -> float:
        start = time.perf_counter()
        async with self._http.post(f"{self._url}/v1/completions", data=self._body) as answer:
            await answer.read()
        return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Measured:
    """Of all measured turns together; `cpu_s` is a turn's in the process under load, all its threads, by round."""

    latencies_s: list[float]
    seconds: float
    cpu_s: list[float]


@dataclass(frozen=True, slots=True)
class Target:
    """What is put under load: a gateway, the naive one, or the engine itself."""

    kind: str
    url: str
    admin_key: str
    pid: int


async def measure(http: aiohttp.ClientSession, target: Target, plan: Plan) -> Measured:
    latencies: list[float] = []
    cpu_s: list[float] = []
    seconds = 0.0
    for round in range(plan.rounds):
        clients: list[Client | Direct] = []
        ids: list[str] = []
        for n in range(plan.concurrency):
            seed = round * plan.concurrency + n
            if target.kind == "engine":
                clients.append(Direct(http, target.url, plan, seed))
                continue
            session = await opened(http, target, seed)
            ids.append(session["id"])
            clients.append(Client(http, *address(session), plan, seed))
        for at in range(0, len(clients), 4):
            await asyncio.gather(*[client.grow() for client in clients[at : at + 4]])
        began_s, before_s = time.perf_counter(), cpu_of(target.pid)
        taken = await asyncio.gather(*[_take_all(client, plan.num_measured) for client in clients])
        cpu_s.append((cpu_of(target.pid) - before_s) / (plan.num_measured * plan.concurrency))
        seconds += time.perf_counter() - began_s
        latencies += [one for client in taken for one in client]
        if target.kind == "gateway":
            for id in ids:
                await admin(http, target, "DELETE", f"/sessions/{id}")
    return Measured(latencies, seconds, cpu_s)


async def _take_all(client: Client | Direct, num_turns: int) -> list[float]:
    return [await client.take() for _ in range(num_turns)]


async def opened(http: aiohttp.ClientSession, target: Target, seed: int) -> dict[str, str]:
    if target.kind == "gateway":
        return await admin(http, target, "POST", "/sessions")
    return {"id": f"s{seed}", "api_key": "none", "base_url": f"{target.url}/s{seed}"}


def address(session: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Where a session's chat is asked for, and with what headers."""
    headers = {"authorization": f"Bearer {session['api_key']}", "content-type": "application/json"}
    return f"{session['base_url']}/v1/chat/completions", headers


async def admin(http: aiohttp.ClientSession, target: Target, method: str, path: str) -> Any:
    headers = {"authorization": f"Bearer {target.admin_key}"}
    async with http.request(method, target.url + path, headers=headers, data=b"{}") as answer:
        answer.raise_for_status()
        return await answer.json()


def cpu_of(pid: int) -> float:
    """CPU seconds that a process has taken so far, in nanosecond steps: Linux has a clock for each."""
    return time.clock_gettime((~pid << 3) | 2)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=json.loads, required=True)
    parser.add_argument("--plan", type=json.loads, required=True)
    args = parser.parse_args()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**22) as http:
        measured = await measure(http, Target(**args.target), Plan(**args.plan))
    print(json.dumps(asdict(measured)))


if __name__ == "__main__":
    uvloop.run(main())
