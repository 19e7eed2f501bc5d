"""A request that is repeated to the next process gets the turn that the last one committed and nobody got."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from stenograph.engines.scripted import Line
from stenograph.traces.sqlite import SqliteTraceStore
from stenograph.types import ToolCall
from support.listening import Client, Session, becomes, listening
from support.outcomes import KEEPS_REASONING, line
from support.streams import assembled
from support.wires import PATHS, Head, Item, Protocol, read, write

SAYS = line("I will look.\nNow.", ToolCall("", "f", '{"word": "é🙂"}'), reasoning="Some thought.\nMore.")
OTHER = line("Something else.")
HEAD = Head(("You are an agent.",), "does f")


def asking(protocol: Protocol, *, stream: bool, **fields: Any) -> bytes:
    body = write(protocol, HEAD, [Item("user", ("Look for it.",))], random.Random(0))
    choices = {"n": 1} if protocol == "chat" else {}
    return json.dumps({"model": "any", "stream": stream, **body, **choices, **fields}).encode()


@asynccontextmanager
async def gateway(path: Path, *lines: Line) -> AsyncIterator[Client]:
    with closing(SqliteTraceStore(path)) as store:
        async with listening(list(lines), store, family=KEEPS_REASONING) as client:
            yield client


async def lost(
    path: Path, body: bytes, address: str, *lines: Line, states: Sequence[str] = ("undelivered",)
) -> Session:
    """A session whose client went away from `body`, committed by a gateway that has ended since."""
    async with gateway(path, *lines) as client:
        session = await client.open()
        _, writer = await session.connect(body, address)
        held = client.gateway.sessions.find(session.id)
        await becomes(lambda: bool(held.tasks))
        writer.close()
        await writer.wait_closed()
        await session.until(*states)
    return session


async def replies(session: Session, protocol: Protocol, body: bytes, *, stream: bool) -> list[Item]:
    status, _, answer = await session.ask(body, PATHS[protocol])
    assert status == 200, answer
    return read(protocol, assembled(protocol, answer) if stream else json.loads(answer))


@pytest.mark.parametrize("protocol", PATHS)
@pytest.mark.parametrize("first_streams", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_repeat_gets_the_committed_turn(
    tmp_path: Path, protocol: Protocol, first_streams: bool, stream: bool
) -> None:
    slow = Line(SAYS.ids, fault="slow:0.1")
    async with gateway(tmp_path / "other.db", SAYS) as client:
        (expected,) = await replies(await client.open(), protocol, asking(protocol, stream=stream), stream=stream)
    path = tmp_path / "traces.db"
    before = await lost(path, asking(protocol, stream=first_streams), PATHS[protocol], slow)
    async with gateway(path, OTHER) as client:
        session = Session(client, before.id, before.api_key)
        ((turn),) = client.gateway.store.tree(session.id).turns
        body = asking(protocol, stream=stream)
        (reply,) = await replies(session, protocol, body, stream=stream)
        assert f"turn_{reply.turn}" == turn
        assert (reply.texts, reply.reasoning) == (expected.texts, expected.reasoning)
        assert [(call.name, call.arguments) for call in reply.calls] == [("f", expected.calls[0].arguments)]
        assert all(reply.turn in call.id for call in reply.calls)
        assert [one["state"] for one in await session.turns()] == ["delivered"]
        (again,) = await replies(session, protocol, body, stream=stream)
        assert again.texts == ("Something else.",)  # it was delivered: who asks again wants another
        ledger = await session.ledger()
        assert ledger["sampled"] == len(SAYS.ids) + len(OTHER.ids)
        assert ledger["dropped"] == {}


async def test_all_choices_are_told_again(tmp_path: Path) -> None:
    lines = (Line(SAYS.ids, fault="slow:0.1"), Line(OTHER.ids, fault="slow:0.1"))
    body = asking("chat", stream=False, n=2)
    before = await lost(tmp_path / "t.db", body, PATHS["chat"], *lines, states=["undelivered"] * 2)
    async with gateway(tmp_path / "t.db") as client:
        session = Session(client, before.id, before.api_key)
        found = await replies(session, "chat", body, stream=False)
        assert [reply.texts for reply in found] == [("I will look.\nNow.",), ("Something else.",)]
        assert [one["state"] for one in await session.turns()] == ["delivered"] * 2


async def test_a_stop_string_and_a_beginning_of_the_agents_own_are_as_they_were(tmp_path: Path) -> None:
    body = json.loads(asking("messages", stream=True, stop_sequences=["else"]))
    body["messages"].append({"role": "assistant", "content": "So:"})
    raw = json.dumps(body).encode()
    async with gateway(tmp_path / "other.db", OTHER) as client:
        expected = assembled("messages", (await (await client.open()).ask(raw, PATHS["messages"]))[2])
    before = await lost(tmp_path / "t.db", raw, PATHS["messages"], Line(OTHER.ids, fault="slow:0.1"))
    async with gateway(tmp_path / "t.db") as client:
        session = Session(client, before.id, before.api_key)
        _, _, answer = await session.ask(raw, PATHS["messages"])
        told = assembled("messages", answer)
        assert expected["content"][-1]["text"].endswith("Something ")
        assert (told["content"], told["stop_reason"]) == (expected["content"], "stop_sequence")


@pytest.mark.parametrize(
    "changed", [{"max_tokens": 50}, {"n": 2}, {"response_format": {"type": "text"}, "max_tokens": 9}]
)
async def test_who_asks_for_more_or_for_other_things_is_answered_anew(tmp_path: Path, changed: dict[str, Any]) -> None:
    before = await lost(
        tmp_path / "t.db", asking("chat", stream=False, max_tokens=8), PATHS["chat"], Line(SAYS.ids, fault="slow:0.1")
    )
    async with gateway(tmp_path / "t.db", OTHER, OTHER) as client:
        session = Session(client, before.id, before.api_key)
        await replies(session, "chat", asking("chat", stream=False, **{"max_tokens": 8, **changed}), stream=False)
        assert len(await session.turns()) == 1 + changed.get("n", 1)


async def test_what_was_gone_on_from_was_got(tmp_path: Path) -> None:
    """A process that ends between the last byte and its note of it."""
    path = tmp_path / "t.db"
    before = await lost(path, asking("chat", stream=False), PATHS["chat"], Line(SAYS.ids, fault="slow:0.1"))
    async with gateway(path, OTHER) as client:
        session = Session(client, before.id, before.api_key)
        (turn,) = client.gateway.store.tree(session.id).turns.values()
        call = turn.reply.tool_calls[0]
        name = turn.id.removeprefix("turn_")
        said = Item("assistant", (turn.reply.content,), turn.reply.reasoning, (call,), turn=name)
        items = [Item("user", ("Look for it.",)), said, Item("tool", ("found",), answers=call.id)]
        body = {"model": "any", **write("chat", HEAD, items, random.Random(0)), "n": 1}
        assert (await session.ask(json.dumps(body).encode()))[0] == 200
        assert [one["parent"] for one in await session.turns()] == [None, turn.id]
    async with gateway(path, OTHER) as client:
        session = Session(client, before.id, before.api_key)
        (reply,) = await replies(session, "chat", asking("chat", stream=False), stream=False)
        assert reply.texts == ("Something else.",)
