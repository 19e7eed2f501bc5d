"""A session that was recorded by one gateway and is replayed by another: the same agent gets the same answers."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stenograph.engines.base import Engine
from stenograph.engines.replay import ReplayEngine
from stenograph.engines.scripted import Line
from stenograph.rendering import Rendering
from stenograph.traces.drift import Drift
from stenograph.traces.memory import MemoryTraceStore
from stenograph.traces.session import SessionRecord
from stenograph.types import Ids, Reply, ToolCall
from support.agents_at_random import CHANGES, Agent, Asked, Book
from support.listening import CHAT, Client, Session, listening, rendering
from support.oracle import Oracle
from support.streams import assembled
from support.tokenizers import template
from support.wires import PATHS, read

RENDERING = rendering()
# When it was, and what depends on how many tokens came at once.
UNRECORDED = re.compile(r'"(created|created_at|completed_at|reasoning_tokens|thinking_tokens)": ?[\d.]+')
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


class Recording(MemoryTraceStore):
    """A store that gives its one record away."""

    @property
    def record(self) -> SessionRecord:
        [record] = self._sessions.values()
        return record


@dataclass(slots=True)
class Replay:
    """A gateway that replays, one of its sessions, and what it found to differ."""

    client: Client
    session: Session
    engine: ReplayEngine
    differences: list[Drift] = field(default_factory=list)

    async def differs(self, body: Any, path: str = CHAT) -> Drift:
        """The difference by which a request is refused."""
        status, headers, answer = await self.session.ask(json.dumps(body).encode(), path)
        assert (status, headers["x-should-retry"]) == (400, "false"), answer
        assert b"is not in the record of steno_" in answer
        return self.differences[-1]


@asynccontextmanager
async def replaying(record: SessionRecord, family: Rendering | None = None) -> AsyncIterator[Replay]:
    differences: list[Drift] = []
    engine = ReplayEngine(record, differences.append)
    async with listening(engine, MemoryTraceStore(record.allowed), family=family, names=engine.names) as client:
        yield Replay(client, await client.open(), engine, differences)


@asynccontextmanager
async def recording(
    engine: Engine | Sequence[Line], store: Recording, family: Rendering | None = None
) -> AsyncIterator[Session]:
    async with listening(engine, store, family=family) as client:
        yield await client.open()


class Speller(Oracle):
    """Says the same in the same ids: in others, a reply that was told twice would be known by neither."""

    def _reply(self, digest: str, times: int, chance: random.Random) -> Ids:
        return self._say(random.Random(f"{self._salt} {digest} {0 if times == 1 else times} says"))


# --- the same agent ------------------------------------------------------------------------------------------------


async def ask(session: Session, asked: Asked) -> Any:
    """The whole answer but for what is not recorded; None where the engine failed."""
    protocol = asked.agent.protocol
    try:
        status, _, body = await session.ask(asked.body, PATHS[protocol])
    except aiohttp.ClientPayloadError:
        return None
    if status == 502:
        return None
    assert status == 200, body
    answer = assembled(protocol, body) if asked.streams else json.loads(body)
    return json.loads(UNRECORDED.sub('"unrecorded":0', json.dumps(answer)))


@pytest.mark.parametrize("seed", range(12))
async def test_agents_at_random_get_the_same_answers_byte_for_byte(seed: int) -> None:
    """Requests sent at the same time may be answered in either order; all else is the same, ids too."""
    chance, book, store = random.Random(seed), Book(), Recording()
    agents = [Agent.new(protocol, book) for protocol in PATHS]
    program: list[list[tuple[Asked, Any]]] = []
    async with recording(Speller(RENDERING, seed), store) as session:
        for _ in range(25):
            agent = chance.choice(agents)
            asked = agent.ask(chance.choice(CHANGES), random.Random(chance.random()))
            answers = await asyncio.gather(*(ask(session, one) for one in asked))
            pairs = [pair for pair in zip(asked, answers, strict=True) if pair[1] is not None]
            program.append(pairs)
            for one, answer in pairs:
                one.agent.adopt(one, chance.choice(read(one.agent.protocol, answer)))
    async with replaying(store.record) as replay:
        for pairs in program:
            answers = await asyncio.gather(*(ask(replay.session, one) for one, _ in pairs))
            assert replay.differences == []
            assert sorted(json.dumps(one) for _, one in pairs) == sorted(map(json.dumps, answers))
        tree = replay.client.gateway.store.tree(replay.session.id)
        assert set(tree.turns) == set(store.record.tree.turns)
        assert replay.engine.num_repeated == replay.engine.num_cut == 0


def lines(*replies: Reply) -> list[Line]:
    return [Line(RENDERING.encode_reply(reply)) for reply in replies]


CALLS = Reply("", "", (ToolCall("", "f", '{"x": 1}'),))
TOOL = {"type": "function", "function": {"name": "f", "description": "Does f.", "parameters": {"type": "object"}}}


def turn_of(answer: bytes) -> Any:
    return json.loads(answer)["choices"][0]["message"]


async def chat(session: Session, system: str = "Be brief.", result: str = "one", **fields: Any) -> list[bytes]:
    """An agent that calls a tool, and answers; what it was told."""
    messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": "Call f."}]
    body = {"model": "m", "messages": messages, "tools": [TOOL], **fields}
    answers = []
    for _ in range(2):
        status, _, answer = await session.ask(json.dumps(body).encode())
        answers.append(answer)
        if status != 200:
            break
        messages.append(turn_of(answer))
        for call in turn_of(answer).get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return answers


def stable(answers: list[bytes]) -> list[str]:
    return [UNRECORDED.sub("", answer.decode()) for answer in answers]


async def recorded(store: Recording, *replies: Reply, family: Rendering | None = None) -> list[str]:
    family = family or RENDERING
    script = [Line(family.encode_reply(reply)) for reply in replies]
    async with recording(script, store, family) as session:
        return stable(await chat(session))


PRINTS_IDS = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + (m.tool_call_id or '') + m.content }}"
    '{%- for call in m.tool_calls or [] %}{{- \'<tool_call>\\n{"name": "\' + call.function.name }}'
    """{{- '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}{%- endfor %}"""
    "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


async def test_ids_that_a_template_prints_are_the_recorded_ones(tmp_path: Path) -> None:
    store, family = Recording(), template(PRINTS_IDS, tmp_path)
    told = await recorded(store, CALLS, Reply("done"), family=family)
    last = list(store.record.tree.turns)[-1]
    name = json.loads(told[0].replace(",,", ","))["choices"][0]["message"]["tool_calls"][0]["id"]
    assert name in family.decode(store.record.tree.path_ids(last))  # else this tests nothing
    async with replaying(store.record, family) as replay:
        assert stable(await chat(replay.session)) == told
        assert replay.differences == []


async def test_choices_and_parallel_requests_of_one_prompt_are_all_given() -> None:
    store = Recording()
    body = {"messages": [{"role": "user", "content": "Say something."}]}
    async with recording(lines(*(Reply(text) for text in "abc")), store) as session:
        several = await session.ask(json.dumps({**body, "n": 2}).encode())
        one = await session.ask(json.dumps(body).encode())
    async with replaying(store.record) as replay:
        again = await replay.session.ask(json.dumps({**body, "n": 2}).encode())
        assert stable([again[2]]) == stable([several[2]])
        assert stable([(await replay.session.ask(json.dumps(body).encode()))[2]]) == stable([one[2]])
        more = json.loads((await replay.session.ask(json.dumps({**body, "n": 2}).encode()))[2])
        assert [choice["message"]["content"] for choice in more["choices"]] == ["c", "c"]  # the last again
        assert (len(replay.engine.replayed), replay.engine.num_repeated) == (3, 2)
        assert more["id"] != json.loads(one[2])["id"]


async def test_an_answer_is_cut_where_fewer_tokens_are_allowed() -> None:
    store = Recording()
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Say something."}]}
    async with recording(lines(Reply("something at length")), store) as session:
        await session.ask(json.dumps(body).encode())
    async with replaying(store.record) as replay:
        _, _, answer = await replay.session.ask(json.dumps({**body, "max_tokens": 5, "temperature": 0.1}).encode())
        assert json.loads(answer)["choices"][0]["finish_reason"] == "length"
        assert "something at length".startswith(turn_of(answer)["content"])
        assert replay.engine.num_cut == 1


# --- another agent -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """How a request differs, and what is said of it."""

    changed: dict[str, Any]
    told: dict[str, Any]


WAYS = {
    "system": Way({"system": "Be curt."}, {"cause": "system_changed", "message": 0, "field": "content", "char": 3}),
    "result": Way({"result": "two"}, {"cause": "message_changed", "message": 3, "role": "tool", "before": "one"}),
    "white space": Way({"result": "one\n"}, {"cause": "message_changed", "message": 3, "after": "one\n", "char": 3}),
    "tools": Way({"tools": []}, {"cause": "tools_changed", "field": "tools", "before": "f", "after": ""}),
}


@pytest.mark.parametrize("way", WAYS)
async def test_the_first_request_that_differs_is_refused_and_said_to(way: str) -> None:
    store, changed = Recording(), WAYS[way].changed
    await recorded(store, CALLS, Reply("done"))
    async with replaying(store.record) as replay:
        answers = await chat(replay.session, **changed)
        error = json.loads(answers[-1])["error"]
        assert error["code"] == "not_recorded"
        [drift] = replay.differences
        assert WAYS[way].told.items() <= asdict(drift).items()
        assert drift.cause in error["message"]
        assert "\n" not in error["message"]
        assert stable(await chat(replay.session)) != stable(answers)  # and the agent that does not is served on


async def test_a_request_behind_the_end_of_the_record_is_told_as_one() -> None:
    store = Recording()
    await recorded(store, CALLS, Reply("done"))
    async with replaying(store.record) as replay:
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Call f."}]
        for result in ("one", None):
            _, _, answer = await replay.session.ask(json.dumps({"messages": messages, "tools": [TOOL]}).encode())
            messages.append(turn_of(answer))
            if result is not None:
                id = turn_of(answer)["tool_calls"][0]["id"]
                messages.append({"role": "tool", "tool_call_id": id, "content": result})
        drift = await replay.differs({"messages": [*messages, {"role": "user", "content": "And?"}], "tools": [TOOL]})
        assert (drift.cause, drift.turn, drift.parent_turn) == ("unknown", "", list(store.record.tree.turns)[-1])


async def test_a_conversation_that_stops_short_of_a_recorded_one_differs() -> None:
    store = Recording()
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    async with recording(lines(Reply("done")), store) as session:
        await session.ask(json.dumps({"messages": messages}).encode())
    async with replaying(store.record) as replay:
        drift = await replay.differs({"messages": messages[:1]})
        assert (drift.cause, drift.message, drift.role) == ("history_truncated", 1, "user")


async def test_another_template_is_no_other_agent(tmp_path: Path) -> None:
    """The conversation is the recorded one, and its ids are not."""
    store = Recording()
    body = {"messages": [{"role": "user", "content": "Say something."}]}
    async with recording(lines(Reply("done")), store) as session:
        await session.ask(json.dumps(body).encode())
    async with replaying(store.record, template(PRINTS_IDS.replace("m.role", "'the ' + m.role"), tmp_path)) as replay:
        drift = await replay.differs(body)
        assert (drift.cause, drift.message, drift.token) == ("template_rewrites_history", None, 1)


async def test_a_prefill_is_part_of_what_is_asked() -> None:
    store = Recording()
    asked = [{"role": "user", "content": "How many?"}]
    body: dict[str, Any] = {"max_tokens": 99, "messages": [*asked, {"role": "assistant", "content": "There are"}]}
    async with recording([Line(RENDERING.encode_text(" nine.<|im_end|>"))], store) as session:
        _, _, told = await session.ask(json.dumps(body).encode(), MESSAGES)
    async with replaying(store.record) as replay:
        assert (await replay.session.ask(json.dumps(body).encode(), MESSAGES))[2] == told
        other = {"max_tokens": 99, "messages": [*asked, {"role": "assistant", "content": "There were"}]}
        drift = await replay.differs(other, MESSAGES)
        assert (drift.message, drift.role, drift.field, drift.char) == (1, "assistant", "content", 6)
        drift = await replay.differs({"max_tokens": 99, "messages": asked}, MESSAGES)
        assert (drift.cause, drift.message, drift.role) == ("history_truncated", 1, "assistant")


async def test_what_matching_accepts_is_no_difference() -> None:
    """Arguments that are written anew, and ids of a client's own, are taken back to what is recorded."""
    store = Recording()
    told = await recorded(store, CALLS, Reply("done"))
    async with replaying(store.record) as replay:
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Call f."}]
        _, _, answer = await replay.session.ask(json.dumps({"messages": messages, "tools": [TOOL]}).encode())
        call = {"id": "mine", "type": "function", "function": {"name": "f", "arguments": '{"x":1.0}'}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "mine", "content": "one"})
        body = {"model": "m", "messages": messages, "tools": [TOOL]}
        _, _, answer = await replay.session.ask(json.dumps(body).encode())
        assert stable([answer]) == told[1:]
        assert replay.differences == []


@pytest.mark.parametrize(("path", "where"), [(CHAT, "messages"), (MESSAGES, "messages"), (RESPONSES, "input")])
@pytest.mark.parametrize("stream", [False, True])
async def test_every_protocol_is_told_in_its_own_shape(path: str, where: str, stream: bool) -> None:
    store = Recording()
    asked = {"max_tokens": 99} if path == MESSAGES else {}
    async with recording(lines(Reply("done")), store) as session:
        await session.ask(json.dumps({**asked, where: [{"role": "user", "content": "one"}]}).encode(), path)
    async with replaying(store.record) as replay:
        body = {**asked, where: [{"role": "user", "content": "two"}], "stream": stream}
        assert (await replay.differs(body, path)).before == "one"
