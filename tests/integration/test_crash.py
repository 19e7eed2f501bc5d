"""A gateway that is killed at any instant has recorded every turn whose answer arrived, and nothing else."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stenograph.rendering import builtin_tokenizer
from stenograph.traces.journal import Journal
from support.agents_at_random import PLAIN, REAL, Agent, Asked, Book, Told
from support.listening import rendering
from support.mortal import MortalGateway, mortal_gateway
from support.oracle import Oracle
from support.oracle_server import serving_oracle
from support.streams import assembled
from support.wires import PATHS, Item, read

RENDERING = rendering()


@dataclass(slots=True)
class Crowd:
    """Agents of one session, who ask again whatever was not answered."""

    gateway: MortalGateway
    session: Any
    chance: random.Random
    book: Book = field(default_factory=Book)
    agents: list[Agent] = field(default_factory=list)

    async def act_until(self, over: asyncio.Event) -> None:
        self.agents += [Agent.new(protocol, self.book) for protocol in PATHS]
        while not over.is_set():
            asked: list[Asked] = []
            for _ in range(self.chance.choice([1, 1, 2, 3])):
                agent = self.chance.choice(self.agents)
                asked += agent.ask(self.chance.choice([*PLAIN, *PLAIN, *REAL]), self.chance)
            answers = await asyncio.gather(*(self._send(one) for one in asked))
            for one, replies in zip(asked, answers, strict=True):
                self.book.turns |= {reply.turn: Told(one, reply) for reply in replies}
                if replies:
                    one.agent.adopt(one, self.chance.choice(replies))
                    if one.agent not in self.agents and len(self.agents) < 8:
                        self.agents.append(one.agent)

    async def _send(self, asked: Asked) -> list[Item]:
        """The replies; none where the engine failed."""
        protocol = asked.agent.protocol
        path = f"/s/{self.session['id']}{PATHS[protocol]}"
        status, body = await self.gateway.ask(path, asked.body, self.session["api_key"])
        if status == 502:
            assert b"at random" in body
            return []
        assert status == 200, body
        return read(protocol, assembled(protocol, body) if asked.streams else json.loads(body))


def check(path: Path, session: str, book: Book, oracle: Oracle) -> None:
    """What is recorded is what was told, and what the engine was sent and returned."""
    with Journal.reading(path) as journal:
        record = journal.load(session)
    told = {f"turn_{name}" for name in book.turns}
    assert told <= record.tree.turns.keys()
    requests = {record.tree.turn(turn).request for turn in told}
    for turn in record.tree.turns.keys() - told:  # where one that asked the same was told another's, twice
        assert record.tree.state(turn) != "delivered"
        assert record.tree.turn(turn).request in requests
    numbers = Counter[int]()
    for turn in record.tree.turns.values():
        generation = oracle.generations[int(-turn.rollout_logprobs[0])]
        numbers[generation.number] += 1
        np.testing.assert_array_equal(turn.output_ids, generation.output)
        np.testing.assert_array_equal(turn.rollout_logprobs, generation.logprobs(0, len(generation.output)))
        np.testing.assert_array_equal(record.tree.path_ids(turn.id), generation.path)
    assert max(numbers.values()) == 1
    for fork in (fork for fork in record.drift if fork.turn in told):
        asked = book.turns[fork.turn.removeprefix("turn_")].asked
        begins = all(item.role != "assistant" for item in asked.said)  # beside the other agents of its session
        known = {"system_changed", "tools_changed"} if begins else {"template_rewrites_history"}
        if not begins and book.continued(asked.head, asked.said) == 0:  # a history that was changed before, rewound
            known |= {"history_truncated", "message_inserted", "arguments_changed", "compaction"}
        assert fork.cause in {*known, "message_changed", asked.cause}, fork  # another question was asked there, too
    for sample in record.samples():
        last = record.tree.turn(sample.turns[-1].turn)
        np.testing.assert_array_equal(sample.ids, oracle.generations[int(-last.rollout_logprobs[0])].path)
    ledger = record.ledger()
    assert ledger.balanced
    in_turns = sum(len(turn.output_ids) for turn in record.tree.turns.values())
    assert ledger.sampled == in_turns + sum(ledger.dropped.values())
    assert set(ledger.dropped) <= {"engine_failed", "aborted"}
    assert ledger.sampled <= sum(len(one.output) for one in oracle.generations.values())


async def survive(folder: Path, seed: int, num_kills: int) -> None:
    chance = random.Random(seed)
    builtin_tokenizer().save_pretrained(folder / "model")
    oracle = Oracle(RENDERING, seed)
    path = folder / "traces.db"
    async with serving_oracle(oracle, RENDERING) as engine:
        arguments = ("--engine", f"vllm:{engine}", "--model", f"{folder}/model", "--set", "model.renderer=qwen3")
        async with mortal_gateway(path, *arguments) as gateway:
            await gateway.start()
            crowd = Crowd(gateway, await gateway.open(), chance)
            over = asyncio.Event()
            acting = asyncio.create_task(crowd.act_until(over))
            for _ in range(num_kills):
                await gateway.live(chance)
                await gateway.start()
            over.set()
            await acting
            num_turns = len(crowd.book.turns)
            await gateway.end(signal.SIGKILL)
    assert num_turns > num_kills
    check(path, crowd.session["id"], crowd.book, oracle)


async def test_ten_kills_lose_nothing_that_was_told(tmp_path: Path) -> None:
    await survive(tmp_path, 0, 10)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, 11))
async def test_a_hundred_kills_lose_nothing_that_was_told(tmp_path: Path, seed: int) -> None:
    await survive(tmp_path, seed, 10)
