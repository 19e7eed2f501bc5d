"""What agent CLIs ask again, with other settings or after a fault: the conversation goes on, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from stenograph.engines.scripted import Line
from support.clis import CLAUDE_CODE, CLIS, CODEX, OPENCODE, Cli, Thread
from support.listening import becomes, listening
from support.outcomes import (
    AGENT,
    CALL,
    ENDS,
    KEEPS_REASONING,
    RUNS,
    Outcome,
    causes,
    line,
    num_tokens,
    outcomes,
    samples,
    settled,
    text_of,
)
from support.tokenizers import any_arguments


@pytest.fixture(params=CLIS)
def cli(request: pytest.FixtureRequest) -> Cli:
    return CLIS[request.param]


# --- what changes from request to request --------------------------------------------------------------------------


async def test_another_token_limit_and_effort_are_the_same_conversation(cli: Cli) -> None:
    """No model's template here is told of effort, so that a turn notes that it was asked for, and nothing more."""
    again = line("Once more.", CALL, when="again\n")
    async with listening([RUNS, again, ENDS], family=KEEPS_REASONING) as client:
        session = await client.open()
        agent = Thread(session, cli, AGENT)
        await agent.ask("Run echo", **{cli.limit: 3000}, **cli.effort("high"))
        await agent.give("again\n", **{cli.limit: 64_000}, **cli.effort("low"))
        await agent.give("hello\n", **{cli.limit: 2000}, **cli.effort("max"))
        assert await outcomes(session) == [
            ("main", None, False, ()),
            ("main", 0, True, cli.accepted),
            ("main", 1, True, cli.accepted),
        ]
        assert await causes(session) == []
        turns = list(client.gateway.store.tree(session.id).turns.values())
        assert [turn.sampling.max_tokens for turn in turns] == [3000, 4096, 2000]
        assert ["ignored:" in note for turn in turns for note in turn.notes].count(True) == 3
        assert await samples(session) == [("main", [text_of(one) for one in (RUNS, again, ENDS)])]
        assert await settled(session) == {"trained": num_tokens(RUNS, again, ENDS)}


async def test_an_effort_that_changes_within_a_message_is_no_change_of_it() -> None:
    """Claude Code says the effort of a turn in a message of the system's behind the user's."""

    def about(effort: str) -> dict[str, Any]:
        return {"role": "system", "content": "The folder is /work.", "output_config": {"effort": effort}}

    runs = replace(RUNS, when="The folder")
    async with listening([runs, ENDS], family=KEEPS_REASONING) as client:
        session = await client.open()
        agent = Thread(session, CLAUDE_CODE, AGENT)
        agent.said = [CLAUDE_CODE.user("Run echo"), about("medium")]
        await agent.answer()
        agent.said[1] = about("high")
        await agent.give("hello\n")
        changed = CLAUDE_CODE.accepted
        assert await outcomes(session) == [("main", None, False, ()), ("main", 0, True, changed)]
        assert await samples(session) == [("main", [text_of(runs), text_of(ENDS)])]


async def test_a_reply_that_its_limit_cut_is_a_sibling_of_the_one_that_a_higher_limit_gives(cli: Cli) -> None:
    async with listening([RUNS, ENDS], family=KEEPS_REASONING) as client:
        session = await client.open()
        agent = Thread(session, cli, AGENT)
        agent.said.append(cli.user("Run echo"))
        status, _, answer = await session.ask(agent.body(**{cli.limit: 20}), cli.path)
        told = {CLAUDE_CODE.path: b'"max_tokens"', OPENCODE.path: b'"length"', CODEX.path: b'"max_output_tokens"'}
        assert (status, told[cli.path] in answer) == (200, True)
        await session.until("delivered")
        await agent.answer(**{cli.limit: 64_000})
        await agent.give("hello\n")
        assert await outcomes(session) == [
            ("main", None, False, ()),
            ("main", None, False, ()),
            ("main", 1, True, cli.accepted),
        ]
        assert await causes(session) == []
        assert await samples(session) == [("main", [text_of(RUNS), text_of(ENDS)])]
        assert await settled(session) == {"trained": num_tokens(RUNS, ENDS), "unadopted": 20}


# --- a stream that is asked for again as a whole -------------------------------------------------------------------


async def test_a_retry_that_does_not_stream_after_a_stream_that_broke_off_is_answered_whole(cli: Cli) -> None:
    cut = replace(RUNS, fault="cut", once=True)
    async with listening([cut, RUNS, ENDS], family=KEEPS_REASONING) as client:
        session = await client.open()
        agent = Thread(session, cli, AGENT)
        agent.said.append(cli.user("Run echo"))
        raw = await session.raw(agent.body(), cli.path)
        assert (b"200 OK" in raw[:20], b"error" in raw, raw.endswith(b"0\r\n\r\n")) == (True, True, False)
        assert await session.turns() == []
        await _go_on_whole(agent)
        num_cut = num_tokens(cut) // 2
        assert await settled(session) == {"trained": num_tokens(RUNS, ENDS), "engine_failed": num_cut}


@pytest.mark.parametrize("waits", [False, True], ids=["in flight", "committed"])
async def test_a_retry_that_does_not_stream_after_its_client_went_away_has_the_same_turn(cli: Cli, waits: bool) -> None:
    async with listening([replace(RUNS, once=True), ENDS], family=KEEPS_REASONING) as client:
        session = await client.open()
        agent = Thread(session, cli, AGENT)
        agent.said.append(cli.user("Run echo"))
        reader, writer = await session.connect(agent.body(), cli.path)
        await asyncio.wait_for(reader.readuntil(b'"m"'), 20)  # the model's name is in what begins a stream
        writer.close()
        await writer.wait_closed()
        calls = client.gateway.sessions.find(session.id).calls
        await becomes(lambda: not any(call.has_client for call in chain(*calls.values())))
        if waits:
            await session.until("undelivered")
        await _go_on_whole(agent)
        await session.until("delivered", "delivered")
        assert await settled(session) == {"trained": num_tokens(RUNS, ENDS)}


async def _go_on_whole(agent: Thread) -> None:
    """Ask again without a stream, with the limit that such requests have, and go on from what comes."""
    said = await agent.answer(stream=False, stream_options=None, **{agent.cli.limit: 21_333})
    assert (said.content, said.calls) == ("I will run it.", (("bash", CALL.arguments),))
    await agent.give("hello\n")
    expected = [("main", None, False, ()), ("main", 0, True, agent.cli.accepted)]
    assert await outcomes(agent.session) == expected
    assert await causes(agent.session) == []
    assert await samples(agent.session) == [("main", [text_of(RUNS), text_of(ENDS)])]


# --- arguments that do not parse -----------------------------------------------------------------------------------


CALLED = 'I will.\n<tool_call>\n{{"name": "bash", "arguments": {}}}\n</tool_call><|im_end|>'
MALFORMED = '{"command": "echo hello'


@pytest.mark.parametrize("echoes", [False, True], ids=["asked again", "told of"])
async def test_a_call_whose_arguments_do_not_parse_is_a_sibling_or_gone_on_from(
    cli: Cli, echoes: bool, tmp_path: Path
) -> None:
    """A client drops such a reply and asks the same again, or sends it back with an error for its result."""
    rendering = any_arguments(tmp_path)
    script = [Line(rendering.encode_text(CALLED.format(text))) for text in (MALFORMED, CALL.arguments)]
    script.append(Line(rendering.encode_text("It printed hello.<|im_end|>")))
    bad, good, ends = script
    async with listening(script, family=rendering) as client:
        session = await client.open()
        agent = Thread(session, cli, AGENT)
        agent.said.append(cli.user("Run echo"))
        asked = list(agent.said)
        await agent.answer()
        if echoes:
            said = await agent.give("error: EOF while parsing a string")
        else:
            agent.said = asked
            said = await agent.answer()
        assert said.calls == (("bash", CALL.arguments),)
        assert (await agent.give("hello\n")).content == "It printed hello."

        second: Outcome = ("main", 0, True, ()) if echoes else ("main", None, False, ())
        assert await outcomes(session) == [("main", None, False, ()), second, ("main", 1, True, cli.accepted)]
        assert await causes(session) == []
        trained = script if echoes else [good, ends]
        assert await samples(session) == [("main", [rendering.decode(one.ids) for one in trained])]
        unadopted = {} if echoes else {"unadopted": num_tokens(bad)}
        assert await settled(session) == {"trained": num_tokens(*trained), **unadopted}


async def test_a_call_that_no_tool_takes_is_gone_on_from_as_its_client_mends_it(tmp_path: Path) -> None:
    """opencode runs `bash` where `Bash` was called, and a tool `invalid` of its own where nothing else can be done."""
    rendering = any_arguments(tmp_path)
    named = CALLED.format(CALL.arguments).replace("bash", "Bash")
    script = [Line(rendering.encode_text(text)) for text in (named, CALLED.format(MALFORMED), "Done.<|im_end|>")]
    async with listening(script, family=rendering) as client:
        session = await client.open()
        agent = Thread(session, OPENCODE, AGENT)
        await agent.ask("Run echo")
        agent.said[-1]["tool_calls"][0]["function"]["name"] = "bash"
        await agent.give("hello\n")
        told = json.dumps({"tool": "bash", "error": "Invalid input for tool bash: JSON parsing failed"})
        agent.said[-1]["tool_calls"][0]["function"] = {"name": "invalid", "arguments": told}
        await agent.give("The arguments provided to the tool are invalid.")
        assert await outcomes(session) == [
            ("main", None, False, ()),
            ("main", 0, True, ("arguments_respelled", "call_mended")),
            ("main", 1, True, ("arguments_respelled", "call_mended")),
        ]
        assert await causes(session) == []
        assert await samples(session) == [("main", [rendering.decode(one.ids) for one in script])]
        assert await settled(session) == {"trained": num_tokens(*script)}
