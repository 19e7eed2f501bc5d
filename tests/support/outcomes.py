"""What became of a session's requests, one line to compare for each, and a model that says what is written for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from stenograph.engines.scripted import Line
from stenograph.traces.session import Disposition
from stenograph.types import Reply, ToolCall
from support.listening import Session, becomes
from support.tokenizers import family

KEEPS_REASONING = family(thinking_retention="all")
AGENT = "You are an agent that writes code in the folder you are given. Change files with care, and run the tests."
CALL = ToolCall("", "bash", '{"command": "echo hello"}')
Outcome = tuple[str, int | None, bool, tuple[str, ...]]  # role, parent by its number, extends, accepted


def line(content: str, *calls: ToolCall, reasoning: str = "", **options: Any) -> Line:
    return Line(KEEPS_REASONING.encode_reply(Reply(content, reasoning, calls)), **options)


RUNS = line("I will run it.", CALL, reasoning="A command.", when="Run echo", fault="pace:0.001")
ENDS = line("It printed hello.", when="hello\n", fault="pace:0.001")


def text_of(line: Line) -> str:
    return KEEPS_REASONING.decode(line.ids)


async def outcomes(session: Session) -> list[Outcome]:
    """Of each turn, in the order in which they were recorded."""
    turns = await session.turns()
    numbers: dict[str | None, int | None] = {turn["id"]: n for n, turn in enumerate(turns)} | {None: None}
    return [(turn["role"], numbers[turn["parent"]], turn["extends"], tuple(turn["accepted"])) for turn in turns]


async def causes(session: Session) -> list[str]:
    """Of the forks."""
    return [fork["cause"] for fork in await session.client.json("GET", f"/sessions/{session.id}/drift")]


async def samples(session: Session) -> list[tuple[str, list[str]]]:
    """The role of each sample and what it trains, turn by turn; a turn is trained as a whole, and nothing beside."""
    told = []
    for sample in await session.client.json("GET", f"/sessions/{session.id}/samples"):
        ids, mask = np.array(sample["ids"], np.int32), np.array(sample["loss_mask"], bool)
        spans = [slice(turn["start"], turn["end"]) for turn in sample["turns"]]
        trained = [span for span in spans if mask[span].any()]
        assert sum(mask[span].all() * (span.stop - span.start) for span in trained) == mask.sum()
        told.append((sample["role"], [KEEPS_REASONING.decode(ids[span]) for span in trained]))
    return told


async def settled(session: Session) -> dict[str, Any]:
    """Where the tokens are after a step on the samples."""
    gateway = session.client.gateway
    gateway.store.settle(session.id, Disposition("trained"), gateway.config.select)
    ledger = await session.ledger()
    assert ledger["in_flight"] == 0
    return {"trained": ledger["trained"], **ledger["masked"], **ledger["dropped"]}


def num_tokens(*lines: Line) -> int:
    return sum(len(line.ids) for line in lines)


async def in_flight(session: Session) -> None:
    """Wait until the session's one call is."""
    await becomes(lambda: len(session.client.gateway.sessions.find(session.id).tasks) == 1)
