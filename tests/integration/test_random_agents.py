"""Agents at random against an oracle that remembers what the engine was sent and what it returned."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import aiohttp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from stenograph.traces.drift import Cause
from stenograph.traces.memory import MemoryTraceStore
from stenograph.traces.session import Disposition
from stenograph.traces.store import TraceStore
from stenograph.types import Turn
from support.agents_at_random import CHANGES, Agent, Asked, Book, Told
from support.habits import is_malformed
from support.listening import Session, becomes, listening, rendering
from support.oracle import Generation, Oracle
from support.streams import assembled, unchunked
from support.together import Spread, at, gateways
from support.wires import PATHS, Item, Protocol, read

RENDERING = rendering()
WORD = re.compile(r"[stuwr]_[0-9a-f]{6}")
NAME = re.compile(rb'"id":"(?:chatcmpl-|msg_|resp_)([0-9a-f]{16})')
CAUSES = set(get_args(Cause)) - {"unknown"}
PROTOCOLS: tuple[Protocol, ...] = tuple(PATHS)


NUM_LONG = int(os.environ.get("STENO_RANDOM_SESSIONS", "40"))  # some minute
PHASES = (Phase.generate, Phase.shrink)
UNCHECKED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@dataclass(frozen=True, slots=True)
class Move:
    """What one agent does next; `agent` counts around those that there are."""

    agent: int
    change: str
    seed: int


AGENTS = st.sampled_from([0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 3, 4])  # one does the most, for its habits to meet
MOVES = st.builds(Move, AGENTS, st.sampled_from(CHANGES), st.integers(0, 2**16))
ROUNDS = st.lists(MOVES, min_size=1, max_size=3)  # moves at the same time


@dataclass(slots=True)
class Play:
    """A program played in one session, and what there is to compare afterwards."""

    session: Session
    store: TraceStore
    oracle: Oracle
    seed: int
    book: Book = field(default_factory=Book)
    agents: list[Agent] = field(default_factory=list)
    num_failed: int = 0

    async def play(self, program: Sequence[Sequence[Move]]) -> None:
        chance = random.Random(self.seed)
        self.agents += [Agent.new(protocol, self.book) for protocol in chance.sample(PROTOCOLS, len(PROTOCOLS))]
        for moves in program:
            asked = []
            for move in moves:
                agent = self.agents[move.agent % len(self.agents)]
                asked += agent.ask(move.change, random.Random(move.seed))
            answers = await asyncio.gather(*(self._send(one) for one in asked))
            for one, replies in chance.sample(list(zip(asked, answers, strict=True)), len(asked)):
                self._adopt(one, replies, chance)
            self.check()
        await self.session.client.json("POST", f"/sessions/{self.session.id}/seal", {})
        status, _, body = await self.session.ask(b'{"messages": [{"role": "user", "content": "late"}]}')
        assert (status, b"sealed" in body) == (409, True)
        self.check()
        num_trained = sum(int(sample.loss_mask.sum()) for sample in self.store.samples(self.session.id))
        self.store.settle(self.session.id, Disposition("trained"))
        ledger = self.store.ledger(self.session.id)
        assert (ledger.balanced, ledger.in_flight, ledger.trained) == (True, 0, num_trained)

    async def _send(self, asked: Asked) -> list[Item]:
        """The replies; none where the engine failed."""
        protocol = asked.agent.protocol
        stream = await self._leave(asked, asked.left) if asked.left is not None else None
        if stream is not None:
            return read(protocol, assembled(protocol, stream))
        try:
            status, _, body = await self.session.ask(asked.body, PATHS[protocol])
        except aiohttp.ClientPayloadError:
            assert asked.streams
            status, body = 502, b"at random"
        if status == 502 and b"at random" in body:
            self.num_failed += 1
            return []
        assert status == 200, body
        return read(protocol, assembled(protocol, body) if asked.streams else json.loads(body))

    async def _leave(self, asked: Asked, num_bytes: int) -> bytes | None:
        """Go away while a stream comes, and wait until the gateway knows; the stream where all of it came before."""
        reader, writer = await self.session.connect(asked.body, PATHS[asked.agent.protocol])
        raw = b""
        while (len(raw) < num_bytes or not NAME.search(raw)) and (more := await reader.read(500)):
            raw += more
        writer.write_eof()
        raw += await reader.read()
        writer.close()
        await writer.wait_closed()
        if raw.endswith(b"0\r\n\r\n"):
            return unchunked(raw)
        if (name := NAME.search(raw)) is not None:
            calls = self.session.client.gateway.sessions.find(self.session.id).calls
            await becomes(
                lambda: not any(one.has_client for one in chain(*calls.values()) if one.name == name[1].decode())
            )
        return None

    def _adopt(self, asked: Asked, replies: list[Item], chance: random.Random) -> None:
        self.book.turns |= {reply.turn: Told(asked, reply) for reply in replies}
        if replies:
            asked.agent.adopt(asked, chance.choice(replies))
            if asked.agent not in self.agents:
                self.agents.append(asked.agent)

    # --- what must hold, always --------------------------------------------------------------------------------

    def check(self) -> None:
        tree = self.store.tree(self.session.id)
        assert {f"turn_{name}" for name in self.book.turns} == set(tree.turns)
        generations = {turn.id: self._generation(turn) for turn in tree.turns.values()}
        assert len({one.number for one in generations.values()}) == len(generations)
        for turn, generation in generations.items():
            np.testing.assert_array_equal(tree.path_ids(turn), generation.path)
            asked = self._told(turn).asked
            check_words(asked, RENDERING.decode(generation.prompt))
            assert {self._told(name).asked.head for name in tree.path_turns(turn)} == {asked.head}
        self._check_samples(generations)
        ledger = self.store.ledger(self.session.id)
        assert ledger.balanced
        assert ledger.sampled == sum(len(one.output) for one in self.oracle.generations.values())
        assert self.num_failed <= sum(one.failed for one in self.oracle.generations.values())

    def _generation(self, turn: Turn) -> Generation:
        """The call that sampled `turn`: its log-probabilities tell."""
        generation = self.oracle.generations[int(-turn.rollout_logprobs[0])]
        np.testing.assert_array_equal(turn.output_ids, generation.output)
        np.testing.assert_array_equal(turn.rollout_logprobs, generation.logprobs(0, len(generation.output)))
        assert turn.versions == ((0, generation.number),)
        return generation

    def check_matches(self) -> None:
        """A turn goes on from the reply that its agent echoed, and what that differs by is said."""
        turns = self.store.tree(self.session.id).turns
        generations = {turn.id: self._generation(turn) for turn in turns.values()}
        causes: defaultdict[bytes, list[str]] = defaultdict(list)  # of turns with equal prompts, the first forks
        for record in self.store.drift(self.session.id):
            causes[generations[record.turn].prompt.tobytes()].append(record.cause)
        for turn in turns.values():
            self._check_match(turn, generations, causes[generations[turn.id].prompt.tobytes()])

    def _check_match(self, turn: Turn, generations: dict[str, Generation], causes: list[str]) -> None:
        asked = self._told(turn.id).asked
        end = self.book.continued(asked.head, asked.said)
        rest = asked.said[end:]
        is_lost = any(item.turn for item in rest)  # a reply does not follow any more what it answered
        assert set(causes) <= CAUSES
        prompt, echoed = generations[turn.id].prompt, self._echoed(asked, end) if end else []
        paths = [generations[name].path for name in echoed]
        extends = any(np.array_equal(prompt[: len(path)], path) for path in paths)
        # Of equal replies without ids, another may be the one that was gone on from.
        is_sure = not extends or asked.history[end - 1].shows_turn(asked.agent.protocol)
        if is_lost and is_sure and not (extends and self._is_first(asked, end, whole)):
            assert len(causes) == 1
        assert len(causes) <= 1
        if causes and asked.cause and is_named(asked) and (extends or end == 0):
            assert causes == [asked.cause]
        if end == 0 or is_lost:
            return
        if extends:
            assert not causes or not self._is_first(asked, end, plain)
            assert set(causes) <= {"message_changed"}
            assert asked.first <= set(turn.accepted) <= self.book.differences(asked)
            assert ("header_changed" in turn.accepted) == (asked.header != self._header(turn.id))
            return
        # A family may drop the reasoning before a new question.
        assert causes == ["template_rewrites_history"]
        assert any(item.role == "user" for item in rest)
        assert any(item.reasoning for item in asked.said[:end])

    def _header(self, turn: str) -> str:
        """The header that the conversation of `turn` was begun with."""
        tree = self.store.tree(self.session.id)
        while (before := tree.parent(turn)) is not None:
            turn = before
        return self._told(turn).asked.header

    def _echoed(self, asked: Asked, end: int) -> list[str]:
        """The turn whose reply is message `end - 1`; without its ids, all that nothing else tells apart from it."""
        told = self.book.turns[asked.said[end - 1].turn]
        alike = [told]
        if not asked.history[end - 1].shows_turn(asked.agent.protocol):
            alike = [other for other in self.book.turns.values() if looks(other) == looks(told)]
        return [f"turn_{one.reply.turn}" for one in alike]

    def _is_first(self, asked: Asked, end: int, seen: Callable[[Item], Item]) -> bool:
        """Whether nobody went on before from the reply, where messages are told apart by what is `seen` of them."""
        told = (self._told(turn).asked for turn in self.store.tree(self.session.id).turns)
        before = takewhile(lambda other: other.said != asked.said, told)
        known = list(map(seen, asked.said[:end]))
        return not any(list(map(seen, other.said[:end])) == known for other in before if other.head == asked.head)

    def _told(self, turn: str) -> Told:
        return self.book.turns[turn.removeprefix("turn_")]

    def _check_samples(self, generations: dict[str, Generation]) -> None:
        """A branch is what its last call was sent and returned, and of that, only what was returned trains, once."""
        trained: Counter[str] = Counter()
        shown: set[str] = set()
        for sample in self.store.samples(self.session.id):
            np.testing.assert_array_equal(sample.ids, generations[sample.turns[-1].turn].path)
            sampled = np.zeros(len(sample.ids), np.bool_)
            for span in sample.turns:
                generation, here = generations[span.turn], slice(span.start, span.end)
                np.testing.assert_array_equal(sample.ids[: span.end], generation.path)
                np.testing.assert_array_equal(
                    sample.rollout_logprobs[here], generation.logprobs(0, span.end - span.start)
                )
                assert set(sample.versions[here]) == {generation.number}
                assert len(set(sample.loss_mask[here])) == 1
                sampled[here] = True
                trained[span.turn] += bool(sample.loss_mask[span.start])
                shown.add(span.turn)
            assert not sample.loss_mask[~sampled].any()
            assert (sample.versions[~sampled] == -1).all()
            assert (sample.rollout_logprobs[~sampled] == 0).all()
        assert all(times <= 1 for times in trained.values())
        tree = self.store.tree(self.session.id)
        assert all(not tree.node(turn).children for turn in generations.keys() - shown)  # nobody went on from them


def is_named(asked: Asked) -> bool:
    """Whether the last reply shows which turn is meant; where there is none, nothing is."""
    replies = [entry for entry in asked.history if entry.said.role == "assistant"]
    return not replies or replies[-1].shows_turn(asked.agent.protocol)


def whole(item: Item) -> Item:
    return item


def plain(item: Item) -> Item:
    """A message without ids."""
    calls = tuple(replace(call, id="") for call in item.calls)
    return replace(item, calls=calls, answers="", turn="", signature="")


def looks(told: Told) -> object:
    """A conversation and its reply without their ids."""
    return told.asked.head, [plain(item) for item in told.asked.said], plain(told.reply)


def check_words(asked: Asked, prompt: str) -> None:
    """A prompt says what its agent said, in the order in which it did, and nothing of any other agent."""
    found = WORD.findall(prompt)
    said = asked.said
    users = [word for item in said if item.role == "user" for word in words(item) if word[0] == "u"]
    assert [word for word in found if word[0] == "u"] == users
    results = [word for item in said if item.role == "tool" for word in words(item)]
    assert Counter(word for word in found if word[0] == "t") == Counter(results)
    head = set(WORD.findall(f"{asked.head}"))
    assert {word for word in found if word[0] == "s"} == head
    replies = {word for item in said if item.role == "assistant" for word in words(item)}
    lost = {
        w for item in said for call in item.calls if is_malformed(call.arguments) for w in WORD.findall(call.arguments)
    }
    kept = {word for word in replies if word[0] == "w"} - lost
    quoted = {word for item in said if item.role == "user" for word in words(item)}
    assert kept <= {word for word in found if word[0] in "wr"} <= replies | quoted


def words(item: Item) -> list[str]:
    return WORD.findall("\n".join([item.reasoning, *item.texts, *(call.arguments for call in item.calls)]))


async def play(program: Sequence[Sequence[Move]], seed: int) -> None:
    oracle, store = Oracle(RENDERING, seed), MemoryTraceStore()
    async with asyncio.timeout(60), listening(oracle, store) as client:
        played = Play(await client.open(), store, oracle, seed)
        await played.play(program)
    played.check_matches()


@pytest.mark.timeout(600)  # for shrinking
@given(st.lists(ROUNDS, min_size=15, max_size=30), st.integers(0, 2**16))
@settings(max_examples=30, deadline=None, derandomize=True, phases=PHASES, suppress_health_check=UNCHECKED)
async def test_every_branch_is_what_the_engine_was_sent_and_returned(program: list[list[Move]], seed: int) -> None:
    await play(program, seed)


@pytest.mark.timeout(600)
@given(st.lists(ROUNDS, min_size=15, max_size=30), st.integers(0, 2**16))
@settings(max_examples=5, deadline=None, derandomize=True, phases=PHASES, suppress_health_check=UNCHECKED)
async def test_it_is_so_whichever_gateway_of_a_journal_is_asked(program: list[list[Move]], seed: int) -> None:
    oracle = Oracle(RENDERING, seed)
    with TemporaryDirectory() as folder:
        async with (
            asyncio.timeout(60),
            gateways(Path(folder) / "traces.db", lambda: oracle) as both,
            aiohttp.ClientSession() as http,
        ):
            session = at(Spread(both, http, seed), await both[0].open())
            played = Play(session, both[0].gateway.store, oracle, seed)
            await played.play(program)
            played.check_matches()


@pytest.mark.slow
@pytest.mark.timeout(600 + 20 * NUM_LONG)
@given(st.lists(ROUNDS, min_size=20, max_size=40), st.integers(0, 2**16))
@settings(max_examples=NUM_LONG, deadline=None, phases=PHASES, suppress_health_check=UNCHECKED)
async def test_in_long_sessions_a_turn_goes_on_from_what_was_echoed(program: list[list[Move]], seed: int) -> None:
    await play(program, seed)
