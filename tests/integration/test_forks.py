"""What a client changes of its history is a named difference, on the branch that it means, or a fork with its cause."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stenograph.engines.scripted import Line
from stenograph.types import Reply, ToolCall
from support.listening import Session, listening, rendering
from support.serving import serving, write_script

RENDERING = rendering()
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = ToolCall("", "add", '{"a": 1.0e1, "b": "é"}')


def line(content: str = "", reasoning: str = "", *calls: ToolCall, **options: Any) -> Line:
    return Line(RENDERING.encode_reply(Reply(content, reasoning, calls)), **options)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(session: Session, messages: Sequence[Any], **fields: Any) -> dict[str, Any]:
    """The message that answers."""
    body = {"model": "m", "messages": messages, "tools": TOOLS, **fields}
    status, _, answer = await session.ask(json.dumps(body).encode())
    assert status == 200, answer
    return dict(json.loads(answer)["choices"][0]["message"])


def text_of(sample: dict[str, Any]) -> str:
    return RENDERING.decode(np.array(sample["ids"], np.int32))


async def drift(session: Session) -> list[Any]:
    return list(await session.client.json("GET", f"/sessions/{session.id}/drift"))


async def test_what_a_client_loses_costs_no_fork_and_is_said() -> None:
    async with listening([line("\n\n", "A tool.", CALL), line("Eleven."), line("Bye.")]) as client:
        session = await client.open()
        said: list[Any] = [user("What is ten and one?")]
        await ask(session, said)
        called = {"type": "function", "function": {"name": "add", "arguments": '{"b":"\\u00e9","a":10}'}}
        said += [{"role": "assistant", "tool_calls": [{"id": "mine", **called}]}]
        said += [{"role": "tool", "content": "11", "tool_call_id": "mine"}]
        await ask(session, said)
        names = ["arguments_respelled", "ids_changed", "reasoning_dropped"]
        first, second = await session.turns()
        assert (first["accepted"], second["accepted"]) == ([], names)
        assert (second["parent"], second["extends"]) == (first["id"], True)
        assert await drift(session) == []
        (sample,) = await client.json("GET", f"/sessions/{session.id}/samples")
        text = text_of(sample)
        assert CALL.arguments in text  # as the model wrote it
        assert "A tool." in text
        await session.ledger()


async def test_where_the_template_drops_reasoning_the_fork_says_so() -> None:
    async with listening([line("b", "why"), line("d")]) as client:
        session = await client.open()
        said: list[Any] = [user("a")]
        said += [await ask(session, said), user("c")]
        await ask(session, said)
        first, second = await session.turns()
        assert (second["parent"], second["extends"]) == (first["id"], False)
        (fork,) = await drift(session)
        assert (fork["cause"], fork["setting"]) == ("template_rewrites_history", "model.thinking_retention")
        assert (fork["message"], fork["field"], fork["before"]) == (1, "reasoning", "why")
        assert fork["rerendered"] > 0
        for sample in await client.json("GET", f"/sessions/{session.id}/samples"):
            assert ("why" in text_of(sample)) == (sample["turns"][-1]["turn"] == first["id"])


async def test_calls_at_the_same_time_have_the_prompts_that_were_sent() -> None:
    slow = Line(RENDERING.encode_reply(Reply("slow")), when="one", fault="slow:0.3")
    async with listening([line("b", when="a"), slow, line("quick", when="two")]) as client:
        session = await client.open()
        said: list[Any] = [user("a")]
        said.append(await ask(session, said))
        replies = await asyncio.gather(*(ask(session, [*said, user(text)]) for text in ("one", "two")))
        assert [reply["content"] for reply in replies] == ["slow", "quick"]
        samples = await client.json("GET", f"/sessions/{session.id}/samples")
        texts = sorted(text_of(sample) for sample in samples)
        assert ["one" in text for text in texts] != ["two" in text for text in texts]
        (fork,) = await drift(session)  # whichever came second
        assert (fork["cause"], fork["message"], fork["rerendered"]) == ("message_changed", 2, 0)


@pytest.mark.parametrize("kept", ["", "part of"], ids=["empty", "partial"])
async def test_a_reply_of_a_failed_attempt_that_is_kept_is_context(kept: str) -> None:
    async with listening([line("b"), line("c", fault="cut"), line("d"), line("e")]) as client:
        session = await client.open()
        said: list[Any] = [user("a")]
        said += [await ask(session, said), user("c")]
        status, _, _ = await session.ask(json.dumps({"model": "m", "messages": said, "tools": TOOLS}).encode())
        assert status == 502
        said += [{"role": "assistant", "content": kept}, user("go on")]
        said += [await ask(session, said), user("more")]
        await ask(session, said)
        turns = await session.turns()
        assert [turn["parent"] for turn in turns] == [None, *(turn["id"] for turn in turns[:2])]
        assert [turn["extends"] for turn in turns] == [False, True, True]
        assert await drift(session) == []
        (sample,) = await client.json("GET", f"/sessions/{session.id}/samples")
        assert f"{kept}<|im_end|>" in text_of(sample)
        assert sum(sample["loss_mask"]) == sum(span["end"] - span["start"] for span in sample["turns"])


async def test_roles_and_what_decided_them_stand_in_the_tree() -> None:
    async with listening([line("A title"), line("b"), line("sub"), line("d")]) as client:
        session = await client.open()
        main = [{"role": "system", "content": "You write code."}, user("a")]
        other = [{"role": "system", "content": "As a search agent, look files up."}, user("find x")]
        await ask(session, [user("Write a title for this conversation: a")], tools=[])
        reply = await ask(session, main)
        await ask(session, other, tools=[])
        await ask(session, [*main, reply, user("c")])
        turns = await session.turns()
        assert [turn["role"] for turn in turns] == ["title", "main", "sub-agent", "main"]
        assert all(turn["role_evidence"] for turn in turns)


async def test_a_response_is_gone_on_from_by_its_id_among_others_that_say_the_same() -> None:
    same = [Line(RENDERING.encode_text(text)) for text in ("same<|im_end|>", "same\n<|im_end|>")]
    async with listening([*same, line("end"), line("end")]) as client:
        session = await client.open()

        async def respond(**body: Any) -> str:
            _, _, answer = await session.ask(json.dumps(body).encode(), "/v1/responses")
            return str(json.loads(answer)["id"])

        ids = [await respond(input="one") for _ in range(2)]
        for id in ids:
            await respond(input="two", previous_response_id=id)
        parents = [turn["parent"] for turn in (await session.turns())[2:]]
        assert parents == [id.replace("resp_", "turn_") for id in ids]


def test_a_difference_that_is_switched_off_is_a_fork_that_says_how_to_accept_it(tmp_path: Path) -> None:
    script = write_script(tmp_path / "script.jsonl", {"content": "b", "reasoning": "why"}, {"content": "d"})
    with serving("--engine", script, "--set", "matching.reasoning_dropped=false") as server:
        session = server.open()
        client = server.client(session)
        for said in ([user("a")], [user("a"), {"role": "assistant", "content": "b"}, user("c")]):
            client.chat.completions.create(model="m", messages=said)  # type: ignore[arg-type]
        (fork,) = server.call("GET", f"/sessions/{session['id']}/drift")
        assert (fork["cause"], fork["setting"]) == ("reasoning_stripped", "matching.reasoning_dropped")
        assert (fork["field"], fork["before"], fork["after"]) == ("reasoning", "why", "")
        assert [turn["accepted"] for turn in server.call("GET", f"/sessions/{session['id']}/tree")["turns"]] == [[], []]
