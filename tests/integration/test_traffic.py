"""What real clients sent, replayed: each request is answered in its protocol, and none forks that changed nothing.

`tests/traffic` holds what was on the wire and, written by hand from it, what has to become of each request: its role
and how the evidence for it begins, the request whose turn it goes on from (`parent`), whether it `extends` that turn's
ids, which differences are `accepted`, the cause of its `fork` where it is one, or that it `fails`. `why` says what in
the bytes decides it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from stenograph.engines.scripted import Line, ScriptedEngine
from stenograph.rendering import Rendering
from support.answers import CHAT, MESSAGES, RESPONSES, Said, read, said
from support.listening import Session, listening
from support.streams import events
from support.tokenizers import any_arguments, family
from traffic.cut import uncut

Row = Mapping[str, Any]  # a request as it was recorded, and its reply

TRAFFIC = Path(__file__).parents[1] / "traffic"
NAMES = sorted(path.stem for path in TRAFFIC.glob("*.jsonl"))
GENERATE = (CHAT, MESSAGES, RESPONSES)
KEEPS_REASONING = family(thinking_retention="all")
STOPS = {CHAT: ("stop", "tool_calls"), MESSAGES: ("end_turn", "tool_use"), RESPONSES: ("completed", "completed")}


@pytest.mark.parametrize("own_ids", [True, False], ids=["own ids", "unknown ids"])
@pytest.mark.parametrize("name", NAMES)
async def test_recorded_traffic_goes_on_where_the_client_changed_nothing(
    name: str, own_ids: bool, tmp_path: Path
) -> None:
    rows = uncut((TRAFFIC / f"{name}.jsonl").read_text())
    expected = json.loads((TRAFFIC / f"{name}.expected.json").read_text())
    malformed = any(not _is_json(arguments) for row in rows for _, arguments in _recorded(row).calls)
    rendering = any_arguments(tmp_path) if malformed else KEEPS_REASONING
    for conversation, outcomes in zip(_conversations(rows), expected, strict=True):
        await _replay(conversation, {outcome["request"]: outcome for outcome in outcomes}, rendering, own_ids)


async def _replay(rows: Sequence[Row], expected: Mapping[int, Any], rendering: Rendering, own_ids: bool) -> None:
    asked = [row for row in rows if row["path"] in GENERATE]
    assert [row["i"] for row in asked] == list(expected)
    script = [_line(row, rendering) for row in asked]
    engine = ScriptedEngine(script)
    engine.capabilities = replace(engine.capabilities, constrained=True)
    async with listening(engine, family=rendering) as client:
        agent = Agent(await client.open(), expected, own_ids)
        for row in rows:
            await (agent.ask(row) if row in asked else agent.ask_aside(row))
        num_cut = sum(len(line.ids) // 2 for line in script if line.fault == "cut")
        num_whole = sum(len(line.ids) for line in script if line.fault is None)
        ledger = await agent.session.ledger()
    assert ledger["sampled"] == num_whole + num_cut
    assert ledger["dropped"] == ({"engine_failed": num_cut} if num_cut else {})


@dataclass(slots=True)
class Agent:
    """A recorded client. With `own_ids` it sends back what the gateway gave, else the ids that were recorded."""

    session: Session
    expected: Mapping[int, Any]  # by request
    own_ids: bool
    recorded: dict[int, Said] = field(default_factory=dict)  # what was said, by request
    given: dict[int, Said] = field(default_factory=dict)  # and what the gateway made of it
    requests: dict[str | None, int | None] = field(default_factory=lambda: {None: None})  # by turn

    async def ask(self, row: Row) -> None:
        request, path, streamed = row["i"], row["path"], row["body"].get("stream", False)
        expected = self.expected[request]
        chain = self._chain(expected.get("parent"))
        status, answer, is_whole = await self._send(row, self._body(row, chain))
        if expected.get("fails"):
            _check_failed(row, status, answer, is_whole)
            return
        assert (status, is_whole) == (200, True), answer
        content, stop = read(path, answer, streamed)
        self.recorded[request], self.given[request] = _recorded(row), said(path, content)
        _check_said(row, self.recorded[request], self.given[request], stop)

        renamed = not self.own_ids and any(self.given[reply].calls for reply in chain)
        accepted = sorted([*expected["accepted"], *(["ids_changed"] if renamed else [])])
        outcome = await self._outcome(request)
        outcome["evidence"] = outcome["evidence"][: len(expected["evidence"])]
        assert outcome == {name: value for name, value in expected.items() if name != "why"} | {"accepted": accepted}

    async def _outcome(self, request: int) -> dict[str, Any]:
        """What became of a request that was answered just now."""
        turns = await self.session.turns()
        assert len(turns) == len(self.given)
        turn = turns[-1]
        self.requests[turn["id"]] = request
        outcome = {
            "request": request,
            "role": turn["role"],
            "evidence": turn["role_evidence"],
            "parent": self.requests[turn["parent"]],
            "extends": turn["extends"],
            "accepted": turn["accepted"],
        }
        drift = await self.session.client.json("GET", f"/sessions/{self.session.id}/drift")
        causes = [fork["cause"] for fork in drift if fork["turn"] == turn["id"]]
        return outcome | ({"fork": causes[0]} if causes else {})

    async def ask_aside(self, row: Row) -> None:
        """What generates nothing is answered all the same, and by us: what was recorded for it is not compared."""
        status, answer, _ = await self._send(row, json.dumps(row["body"]).encode() if row["method"] == "POST" else None)
        assert status == 200, answer
        if row["method"] == "POST":
            assert json.loads(answer)["input_tokens"] > 0

    async def _send(self, row: Row, body: bytes | None) -> tuple[int, bytes, bool]:
        key = self.session.api_key
        credentials = ("x-api-key", key) if row["path"].startswith(MESSAGES) else ("authorization", f"Bearer {key}")
        path = f"/s/{self.session.id}{row['path']}" + (f"?{row['query']}" if "query" in row else "")
        return await self.session.client.hear(row["method"], path, body, [*map(tuple, row["headers"]), credentials])

    def _chain(self, request: int | None) -> list[int]:
        """The requests whose replies a request carries that goes on from `request`, the first one first."""
        chain: list[int] = []
        while request is not None:
            chain.insert(0, request)
            request = self.expected[request]["parent"]
        return chain

    def _body(self, row: Row, chain: Sequence[int]) -> bytes:
        """The recorded body, with what the gateway gave in the place of what was said when it was recorded."""
        text, seals = _dumps(row["body"]), []
        for request in chain:
            old, new = self.recorded[request], self.given[request]
            pairs = [(old.content, new.content)]  # a model's family may take white space off
            if self.own_ids:
                pairs.append((old.reasoning, new.reasoning))
                pairs += [(was, now) for (_, was), (_, now) in zip(old.ids, new.ids, strict=True)]
                seals += zip(old.seals, new.seals, strict=False)  # none where the client does not ask for them
            for before, after in pairs:
                text = text.replace(_dumps(before), _dumps(after)) if before != after else text
        return _with_seals(text, seals).encode()


def _with_seals(text: str, seals: Sequence[tuple[str, str]]) -> str:
    """One signature stands for every one in a recording, so they are told apart by their order."""
    if not seals:
        return text
    pieces = text.split(_dumps(seals[0][0]))
    assert len(pieces) == len(seals) + 1
    return pieces[0] + "".join(_dumps(new) + piece for (_, new), piece in zip(seals, pieces[1:], strict=True))


def _check_said(row: Row, recorded: Said, given: Said, stop: str) -> None:
    """The client is told the same. White space at both ends is the family's to take off, and thinking may be hidden."""
    hidden = row["body"].get("thinking", {}).get("display") == "omitted"
    assert (given.content, given.reasoning) == (recorded.content.strip(), "" if hidden else recorded.reasoning)
    if row["path"] == MESSAGES and not row["body"].get("stream"):
        assert [(name, json.loads(arguments)) for name, arguments in given.calls] == [
            (name, json.loads(arguments)) for name, arguments in recorded.calls
        ]
    else:
        assert given.calls == recorded.calls
    assert [kind for kind, _ in given.ids] == [kind for kind, _ in recorded.ids]
    assert stop == STOPS[row["path"]][bool(recorded.calls)]


def _check_failed(row: Row, status: int, answer: bytes, is_whole: bool) -> None:
    """An error before the first token has a status; one in a stream is an event, and the stream has no end."""
    if row["reply"]["kind"] == "error":
        assert (status, is_whole) == (502, True)
        assert "message" in json.loads(answer)["error"]
        return
    assert (status, is_whole) == (200, False)
    last = events(answer)[-1]
    assert "error" in last or last["type"] == "response.failed"


def _recorded(row: Row) -> Said:
    reply = row["reply"]
    content = reply.get("content", reply.get("planned_content"))
    return said(row["path"], content) if content is not None else Said("", "", (), (), ())


def _line(row: Row, rendering: Rendering) -> Line:
    """The model says exactly what was recorded, and fails where it failed."""
    reply, kind = _recorded(row), row["reply"]["kind"].partition(":")[0]
    reasoning = f"<think>\n{reply.reasoning}\n</think>\n\n" if reply.reasoning else ""
    text = reasoning + reply.content
    for name, arguments in reply.calls:
        text += f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    faults = {"sse": None, "json": None, "error": "error", "cutclean": "cut", "sseerr": "cut", "cut": "cut"}
    return Line(rendering.encode_text(text + "<|im_end|>"), fault=faults[kind])


def _conversations(rows: Sequence[Row]) -> list[list[Row]]:
    """A conversation begins where the requests are counted anew."""
    starts = [n for n, row in enumerate(rows) if row["i"] == 1]
    return [list(rows[start:end]) for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
