"""Clients, an engine and an owner at random, against books that the engine keeps: what is seen whole is recorded."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import numpy as np
import pytest

from stenograph.engines.base import Chunk, Generate
from stenograph.engines.scripted import ScriptedEngine
from stenograph.errors import EngineError
from stenograph.traces.memory import MemoryTraceStore
from stenograph.types import Reply, ToolCall
from support.listening import CHAT, Client, Session, becomes, listening, rendering

RENDERING = rendering()
ENDS = {
    CHAT: rb'"finish_reason":"|\[DONE\]',
    "/v1/messages": rb'message_stop|"stop_reason":"',
    "/v1/responses": rb"event: response\.(completed|incomplete)",
}
NAME = re.compile(rb'"id":"(?:chatcmpl|msg|resp)_?-?([0-9a-f]{16})"')
FAULTS = ["error", "cut", "abort", "abort with tokens", "bug", "reset", "cancelled", "after its end"]


@dataclass(eq=False)
class Generation:
    """What the engine was asked and has sent."""

    request: Generate
    ids: list[int] = field(default_factory=list)


class Books(ScriptedEngine):
    """Says something new each time, in pieces of any size, at any pace, and fails in any way."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__([])
        self._chance = chance
        self.generations: list[Generation] = []
        self.num_open = 0

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        chance = self._chance
        generation = Generation(request)
        self.generations.append(generation)
        calls = (ToolCall("", "f", '{"x": 1}'),) if chance.random() < 0.2 else ()
        text = "".join(chance.choice("ab STOP.\n<é") for _ in range(chance.randrange(30)))
        ids = RENDERING.encode_reply(Reply(f"answer {len(self.generations)} {text}", "hm" * chance.randrange(2), calls))
        ids = ids[: request.sampling.max_tokens]
        fault = chance.choice([None] * 20 + FAULTS)
        fails_at = chance.randrange(len(ids)) if fault else len(ids)
        pace = chance.choice([0, 0, 0.001, 0.005])
        self.num_open += 1
        try:
            while len(generation.ids) < len(ids):
                await asyncio.sleep(pace)
                await self._running.wait()
                piece = ids[len(generation.ids) :][: chance.choice([0, 1, 1, 5, 50])]
                logprobs = np.full(len(piece), -1, np.float32)
                if len(generation.ids) + len(piece) > fails_at:
                    if fault == "abort with tokens":
                        generation.ids += piece.tolist()
                        yield Chunk(piece, logprobs, 0, "abort")
                    if fault != "after its end":
                        self._fail(fault)
                        yield Chunk(piece[:0], logprobs[:0], 0, "abort")
                        return
                generation.ids += piece.tolist()
                over = len(generation.ids) == len(ids)
                ended = "stop" if int(ids[-1]) in request.stop_token_ids else "length"
                yield Chunk(piece, logprobs, 0, ended if over else None)
            yield Chunk(ids[:3], np.zeros(3, np.float32), 0)
        finally:
            self.num_open -= 1

    def _fail(self, fault: str | None) -> None:
        match fault:
            case "error" | "cut":
                raise EngineError(f"at random: {fault}")
            case "bug":
                raise ValueError("at random")
            case "reset":
                raise ConnectionResetError("at random")
            case "cancelled":
                raise asyncio.CancelledError


@dataclass
class Clients:
    """Requests at random, and the turns whose answers were read to their end."""

    client: Client
    store: MemoryTraceStore
    chance: random.Random
    sessions: list[Session]
    whole: Counter[str] = field(default_factory=Counter)

    async def ask(self) -> None:
        chance, session = self.chance, self.chance.choice(self.sessions)
        path, stream = chance.choice(list(ENDS)), chance.random() < 0.6
        said = [{"role": "user", "content": chance.choice(["alpha", "beta"])}]
        asked = {"stream": stream, "max_tokens": chance.choice([20, 1000])}
        if path == "/v1/responses":
            asked = {"stream": stream, "input": said}
        elif path == CHAT:
            asked |= {"messages": said, "n": chance.choice([1, 1, 2]), "stop": chance.choice([[], ["STOP", "."]])}
        else:
            asked |= {"messages": said}
        reader, writer = await session.connect(json.dumps(asked).encode(), path)
        try:
            match chance.choice(["read", "read", "read", "leave", "leave in mid-stream", "half-close"]):
                case "read":
                    self._check(session, path, stream, await reader.read())
                case "half-close":
                    writer.write_eof()
                    await reader.read()
                case "leave in mid-stream":
                    await reader.read(chance.randrange(1, 2000))
                case _:
                    await asyncio.sleep(chance.choice([0, 0.005, 0.02]))
        finally:
            writer.close()
            await writer.wait_closed()

    def _check(self, session: Session, path: str, stream: bool, raw: bytes) -> None:
        """Whole and recorded, or an error without an end."""
        head, _, body = raw.partition(b"\r\n\r\n")
        ended = re.search(ENDS[path], body) is not None
        if b" 200 " not in head.split(b"\r\n")[0] or (stream and not ended):
            assert b'"error":{' in body
            assert not ended
            assert not (stream and body.endswith(b"0\r\n\r\n"))
            return
        assert not stream or body.endswith(b"0\r\n\r\n")
        name = NAME.search(body)
        assert name is not None
        self.whole[name[1].decode()] += 1
        if session in self.sessions:  # else it may be deleted, and its record with it
            assert f"turn_{name[1].decode()}" in self.store.tree(session.id).turns

    async def own(self, engine: Books) -> None:
        """Open, seal and delete sessions; pause and resume the engine."""
        while True:
            await asyncio.sleep(self.chance.random() * 0.2)
            await engine.pause("keep")
            await asyncio.sleep(0.01)
            await engine.resume()
            session = self.sessions.pop(0)
            self.sessions.append(await self.client.open())
            if self.chance.random() < 0.5:
                await self.client.json("POST", f"/sessions/{session.id}/seal", {})
            else:
                await self.client.json("DELETE", f"/sessions/{session.id}")


@pytest.mark.parametrize("seed", range(3))
async def test_in_any_order_the_books_agree(seed: int) -> None:
    chance = random.Random(seed)
    engine, store = Books(chance), MemoryTraceStore()
    settings = {"seal_timeout_s": 0.1, "keep_alive_s": 0.02, "disconnect_timeout_s": chance.choice([0.05, 5])}
    async with asyncio.timeout(100), listening(engine, store, **settings) as client:
        clients = Clients(client, store, chance, [await client.open() for _ in range(4)])
        owner = asyncio.create_task(clients.own(engine))

        async def work() -> None:
            for _ in range(25):
                await clients.ask()

        async with asyncio.TaskGroup() as group:
            for _ in range(12):
                group.create_task(work())
        owner.cancel()
        await asyncio.wait([owner])
        await engine.resume()
        held = client.gateway.sessions.find
        await becomes(lambda: engine.num_open == 0 and not any(held(one.id).tasks for one in clients.sessions))
        assert clients.whole
        assert set(clients.whole.values()) == {1}  # nothing that was delivered is given to another
        for session in clients.sessions:
            compare(store, session, [one for one in engine.generations if one.request.session == session.id])
            tree = store.tree(session.id)
            for turn in tree.turns:
                state = tree.state(turn)
                assert state != "committed"
                assert state == "delivered" or turn.split("_")[1] not in clients.whole
            kept = [call.state for same in held(session.id).calls.values() for call in same]
            assert set(kept) <= {"undelivered"}


def compare(store: MemoryTraceStore, session: Session, generations: list[Generation]) -> None:
    """Every turn was sampled, from the prompt that it is recorded with; every token is accounted for once."""
    tree, ledger = store.tree(session.id), store.ledger(session.id)
    sampled = Counter((tuple(one.request.ids.tolist()), tuple(one.ids)) for one in generations)
    for name, turn in tree.turns.items():
        path, output = tree.path_ids(name).tolist(), turn.output_ids.tolist()
        recorded = (tuple(path[: len(path) - len(output)]), tuple(output))
        assert sampled[recorded] > 0
        sampled[recorded] -= 1
    assert ledger.balanced
    assert ledger.sampled == sum(len(one.ids) for one in generations)
