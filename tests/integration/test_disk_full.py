"""A gateway whose disk is full says so to its agents in their protocol, keeps what it had, and goes on with room."""

from __future__ import annotations

import json
import random
import signal
from itertools import product
from pathlib import Path
from typing import Any

from stenograph.traces.journal import Journal
from support.mortal import MortalGateway, mortal_gateway
from support.serving import write_script
from support.streams import assembled, events
from support.wires import PATHS, Head, Item, Protocol, read, write

HEAD = Head(("You are an agent.",), "does f")
ENDS = {"chat": b"[DONE]", "messages": b"message_stop", "responses": b"response.completed"}


async def ask(gateway: MortalGateway, session: Any, protocol: Protocol, stream: bool) -> tuple[int, bytes, bool]:
    body = write(protocol, HEAD, [Item("user", ("hello",))], random.Random(0))
    choices = {"n": 1} if protocol == "chat" else {}
    asked = json.dumps({"model": "any", "stream": stream, **body, **choices}).encode()
    return await gateway.hear(f"/s/{session['id']}{PATHS[protocol]}", asked, session["api_key"])


async def until_full(gateway: MortalGateway, session: Any, protocol: Protocol, stream: bool) -> tuple[int, int, bytes]:
    """How many were answered before the disk was full, and what was said then: the status and what came of a body."""
    for num_answered in range(100):
        status, body, whole = await ask(gateway, session, protocol, stream)
        if status != 200 or not whole:
            return num_answered, status, body
        assert read(protocol, assembled(protocol, body) if stream else json.loads(body))[0].texts == ("hi there",)
    raise AssertionError("it is never full")


async def test_what_an_agent_is_told_and_what_is_kept(tmp_path: Path) -> None:
    script = write_script(tmp_path / "script.jsonl", {"content": "hi there", "when": "hello"})
    path = tmp_path / "traces.db"
    async with mortal_gateway(path, "--engine", script) as gateway:
        for protocol, stream in product(PATHS, [False, True]):
            await gateway.start(dies_when_full=False)
            session = await gateway.open()
            after = await fill_and_go_on(gateway, session, protocol, stream)
            await gateway.end(signal.SIGKILL)
            with Journal.reading(path) as journal:
                ledger = journal.load(session["id"]).ledger()
            found = (ledger.sampled, ledger.in_flight, ledger.dropped)
            assert found == (after["sampled"], after["in_flight"], after["dropped"])


async def fill_and_go_on(gateway: MortalGateway, session: Any, protocol: Protocol, stream: bool) -> Any:
    """The session's ledger at the end."""
    address = f"/sessions/{session['id']}"
    gateway.limit(60_000)
    num_answered, status, body = await until_full(gateway, session, protocol, stream)
    assert num_answered > 0
    assert b"is the disk full" in body
    assert ENDS[protocol] not in body
    assert status == (200 if stream else 500)
    assert "error" in json.dumps(events(body)[-1] if stream else json.loads(body))
    for _ in range(2):  # and it stays so
        assert (await ask(gateway, session, protocol, stream=False))[0] == 500
    ledger = await gateway.get(f"{address}/ledger")
    num_tokens = ledger["in_flight"] // num_answered
    assert ledger["dropped"] == {"commit_failed": 3 * num_tokens}
    assert ledger["sampled"] == ledger["in_flight"] + 3 * num_tokens
    assert len((await gateway.get(f"{address}/tree"))["turns"]) == num_answered
    gateway.limit(100_000_000)
    assert (await ask(gateway, session, protocol, stream=False))[0] == 200
    after = await gateway.get(f"{address}/ledger")
    assert after["in_flight"] == ledger["in_flight"] + num_tokens
    return after
