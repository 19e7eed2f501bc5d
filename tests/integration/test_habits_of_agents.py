"""What agent CLIs ask beside their conversation, and at the same time: each request has its role, place and books."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stenograph.engines.scripted import Line, ScriptedEngine
from stenograph.types import ToolCall
from support.clis import CLAUDE_CODE, CLIS, CODEX, OPENCODE, SESSION, Cli, Thread, codex_turn
from support.listening import Session, listening
from support.outcomes import (
    AGENT,
    CALL,
    ENDS,
    KEEPS_REASONING,
    RUNS,
    causes,
    in_flight,
    line,
    num_tokens,
    outcomes,
    samples,
    settled,
    text_of,
)

SUMMARY = "A bug in parse.py was found and mended; the tests that failed before run well now."


@pytest.fixture(params=CLIS)
def cli(request: pytest.FixtureRequest) -> Cli:
    return CLIS[request.param]


# --- titles --------------------------------------------------------------------------------------------------------


TITLE = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
NAMED = line("Echo hello", when="<asked>")
TITLES: dict[str, tuple[Cli, str, list[str], dict[str, Any]]] = {
    "Claude Code": (
        CLAUDE_CODE,
        "Name the work in 3-7 words.",
        ["<asked>\nRun echo\n</asked>"],
        {"output_config": {"effort": "medium", "format": {"type": "json_schema", "schema": TITLE}}},
    ),
    "opencode": (
        OPENCODE,
        "You are a title generator. You output ONLY a thread title.",
        ["Generate a title for this conversation:\n", '"<asked>"'],
        {},
    ),
    "Qwen Code": (  # which has its answers in a schema from a function's arguments
        OPENCODE,
        "Generate a title of 3-7 words that says what this coding session is about. Return JSON.",
        ["<asked>"],
        {"tools": [{"type": "function", "function": {"name": "respond_in_schema", "parameters": TITLE}}]},
    ),
}


@pytest.mark.parametrize("is_first", [True, False], ids=["title first", "agent first"])
@pytest.mark.parametrize("name", TITLES)
async def test_a_title_asked_at_the_same_time_is_beside_the_conversation(name: str, is_first: bool) -> None:
    cli, system, texts, fields = TITLES[name]
    engine = ScriptedEngine([NAMED, RUNS, ENDS])
    engine.capabilities = replace(engine.capabilities, constrained=True)
    async with listening(engine, family=KEEPS_REASONING) as client:
        session = await client.open()
        agent = Thread(session, cli, AGENT, ("bash", "task"))
        aside = Thread(session, cli, system, (), said=[cli.user(text) for text in texts])
        asked = [aside.answer(**fields), agent.ask("Run echo")]
        said = await asyncio.gather(*(asked if is_first else reversed(asked)))
        assert {one.content for one in said} == {"Echo hello", "I will run it."}
        await agent.give("hello\n")
        assert await outcomes(session) == [
            ("title", None, False, ()),
            ("main", None, False, ()),
            ("main", 1, True, cli.accepted),
        ]
        assert await samples(session) == [("main", [text_of(RUNS), text_of(ENDS)])]
        books = await settled(session)
        assert (books.pop("trained"), sum(books.values())) == (num_tokens(RUNS, ENDS), num_tokens(NAMED))


@pytest.mark.parametrize("is_first", [True, False], ids=["asked first", "agent first"])
async def test_what_is_asked_without_tools_beside_an_agents_first_turn_is_not_its_conversation(is_first: bool) -> None:
    named = line("Echo hello", when="<asked>", fault="slow:0.2" if is_first else None)
    async with listening([RUNS, ENDS, named], family=KEEPS_REASONING) as client:
        session = await client.open()
        agent = Thread(session, OPENCODE, AGENT, ("bash",))
        aside = Thread(session, OPENCODE, "Say whether this is a new topic.", ())
        asked = [agent.ask("Run echo"), aside.ask("<asked>")]
        begun = asyncio.create_task(asked.pop(is_first))
        await in_flight(session)
        await asked.pop()
        assert not begun.done()
        await begun
        await agent.give("hello\n")
        roles = ["main", "sub-agent", "main"] if is_first else ["sub-agent", "main", "main"]
        assert [role for role, *_ in await outcomes(session)] == roles
        assert sorted(await samples(session)) == [
            ("main", [text_of(RUNS), text_of(ENDS)]),
            ("sub-agent", [text_of(named)]),
        ]


# --- the same asked twice at nearly the same time ------------------------------------------------------------------


@pytest.mark.parametrize("word", ["one", "a"], ids=["equal", "one word apart"])
async def test_two_summaries_asked_a_moment_apart_are_two_samples(cli: Cli, word: str) -> None:
    """The second comes while the first is streamed."""
    summaries = [line(f"{n}: {SUMMARY}", fault="pace:0.002") for n in (1, 2)]
    goes_on = line("More it is.", when="Now more")
    select = {"roles": ["main", "compaction"]}
    async with listening([RUNS, ENDS, *summaries, goes_on], select=select, family=KEEPS_REASONING) as client:
        session = await client.open()
        agent = Thread(session, cli, AGENT)
        await agent.ask("Run echo")
        await agent.give("hello\n")
        headers = codex_turn(SESSION, "compaction") if cli is CODEX else {}
        pair = [
            Thread(session, cli, AGENT, said=[*agent.said, cli.user(asks_for_summary(word))], headers=headers)
            for word in ("one", word)
        ]
        first = asyncio.create_task(pair[0].answer())
        await in_flight(session)
        second = await pair[1].answer()
        assert [(await first).content, second.content] == [f"{n}: {SUMMARY}" for n in (1, 2)]
        await agent.ask("Now more")

        changed = cli.accepted
        assert await outcomes(session) == [
            ("main", None, False, ()),
            ("main", 0, True, changed),
            ("compaction", 1, True, changed),
            ("compaction", 1, True, changed),
            ("main", 1, True, changed),
        ]
        assert await causes(session) == ["message_changed"] * (1 if word == "one" else 2)
        assert await samples(session) == [
            ("compaction", [text_of(summaries[0])]),
            ("compaction", [text_of(summaries[1])]),
            ("main", [text_of(one) for one in (RUNS, ENDS, goes_on)]),
        ]
        assert await settled(session) == {"trained": num_tokens(RUNS, ENDS, *summaries, goes_on)}


def asks_for_summary(word: str) -> str:
    return f"Do not call any tools. Summarize the conversation so far in {word} line."


# --- counting ------------------------------------------------------------------------------------------------------


async def test_a_burst_of_counts_leaves_nothing_and_tells_what_prompts_come_to() -> None:
    """As Claude Code measures its own context: each tool and each part of its system text alone."""
    goes_on, short = line("More it is.", when="Now more"), line("Foo.", when="foo")
    ends = replace(ENDS, fault="pace:0.01")  # for the burst to be over before
    async with listening([RUNS, ends, goes_on, short], family=KEEPS_REASONING) as client:
        session, other = await client.open(), await client.open()
        agent = Thread(session, CLAUDE_CODE, AGENT)
        await agent.ask("Run echo")
        going_on = asyncio.create_task(agent.give("hello\n"))
        await in_flight(session)
        parts = [f"foo {'and more ' * n}" for n in range(12)]
        asked = [{"model": "m", "messages": [{"role": "user", "content": part}], "tools": []} for part in parts]
        tools = [{"name": "t" * n, "input_schema": {"type": "object"}} for n in range(1, 13)]
        asked += [{"model": "m", "messages": [{"role": "user", "content": "foo"}], "tools": [tool]} for tool in tools]
        counts = await asyncio.gather(*(count(session, body) for body in asked))
        assert not going_on.done()
        assert (await going_on).content == "It printed hello."
        assert counts == [await num_prompt(other, body) for body in asked]
        assert len(set(counts)) == len(asked)

        agent.said.append(CLAUDE_CODE.user("Now more"))
        body = json.loads(agent.body(stream=False))
        counted = await count(session, {name: body[name] for name in ("model", "system", "messages", "tools")})
        assert counted == await num_prompt(session, body)
        assert await outcomes(session) == [
            ("main", None, False, ()),
            ("main", 0, True, ("arguments_respelled",)),
            ("main", 1, True, ("arguments_respelled",)),
        ]
        (sample,) = await client.json("GET", f"/sessions/{session.id}/samples")
        assert len(sample["ids"]) == counted + num_tokens(goes_on)
        assert await samples(session) == [("main", [text_of(one) for one in (RUNS, ENDS, goes_on)])]
        assert await settled(session) == {"trained": num_tokens(RUNS, ENDS, goes_on)}


async def count(session: Session, body: dict[str, Any]) -> int:
    status, _, answer = await session.ask(json.dumps(body).encode(), "/v1/messages/count_tokens?beta=true")
    assert status == 200, answer
    return int(json.loads(answer)["input_tokens"])


async def num_prompt(session: Session, body: dict[str, Any]) -> int:
    """Tokens of the prompt that the same asks a turn for."""
    status, _, answer = await session.ask(json.dumps({"max_tokens": 100, **body}).encode(), "/v1/messages?beta=true")
    assert status == 200, answer
    return int(json.loads(answer)["usage"]["input_tokens"])


# --- sub-agents ----------------------------------------------------------------------------------------------------


async def test_sub_agents_and_their_parent_at_the_same_time_each_keep_their_branch(cli: Cli) -> None:
    def looks(word: str) -> list[Line]:
        call = ToolCall("", "grep", json.dumps({"command": f"grep {word}"}))
        looking = line(f"I look for {word}.", call, when=f"Find {word}", fault="pace:0.001")
        return [looking, line(f"{word} is in a file.", when=f"{word}:1", fault="pace:0.001")]

    goes_on = line("On to the next.", CALL, when="while they look", fault="pace:0.001")
    work = {word: looks(word) for word in ("parsers", "writers")}
    script = [RUNS, ENDS, goes_on, *work["parsers"], *work["writers"]]
    async with listening(script, family=KEEPS_REASONING) as client:
        session = await client.open()
        agent = Thread(session, cli, AGENT, ("bash", "task"))
        await agent.ask("Run echo")
        finders = {
            word: Thread(session, cli, "You look for files and report their paths.", ("grep",), name=f"{n}a")
            for n, word in enumerate(work)
        }

        async def find(word: str) -> None:
            await finders[word].ask(f"Find {word}")
            await finders[word].give(f"{word}:1")

        async def go_on() -> None:
            await agent.give("while they look")
            await agent.give("hello\n")

        await asyncio.gather(go_on(), *map(find, finders))
        turns = await outcomes(session)
        assert sorted(role for role, *_ in turns) == ["main"] * 3 + ["sub-agent"] * 4
        assert [parent for _, parent, *_ in turns].count(None) == 3
        assert all(extends for _, parent, extends, _ in turns if parent is not None)
        told = await samples(session)
        assert sorted(role for role, _ in told) == ["main", "sub-agent", "sub-agent"]
        assert sorted(trained for _, trained in told) == sorted(
            [text_of(one) for one in lines] for lines in ([RUNS, goes_on, ENDS], *work.values())
        )
        for sample in await client.json("GET", f"/sessions/{session.id}/samples"):
            text = KEEPS_REASONING.decode(np.array(sample["ids"], np.int32))
            assert ["Run echo" in text, "parsers" in text, "writers" in text].count(True) == 1
        assert await settled(session) == {"trained": num_tokens(*script)}


# --- compaction ----------------------------------------------------------------------------------------------------


async def test_an_agent_that_is_compacted_goes_on_from_its_summary_on_a_new_branch(cli: Cli) -> None:
    summary = line(SUMMARY, reasoning="To sum up.", when="ummar")
    goes_on = line("On with it.", CALL, when="Go on from there")
    async with listening([goes_on, summary, RUNS, ENDS], family=KEEPS_REASONING) as client:
        session = await client.open()
        agent = Thread(session, cli, AGENT)
        await agent.ask("Run echo")
        await agent.give("hello\n")
        compacted = _compacting(agent)
        assert (await compacted.answer()).content == SUMMARY
        agent.said = _from_summary(agent, compacted)
        await agent.answer()
        await agent.give("hello\n")

        changed, own_prompt = cli.accepted, cli is not CLAUDE_CODE
        assert await outcomes(session) == [
            ("main", None, False, ()),
            ("main", 0, True, changed),
            ("compaction", None if own_prompt else 1, not own_prompt, () if own_prompt else changed),
            ("main", None, False, ()),
            ("main", 3, True, changed),
        ]
        at_compaction = {CLAUDE_CODE.path: [], OPENCODE.path: ["system_changed"], CODEX.path: ["tools_changed"]}
        assert await causes(session) == [*at_compaction[cli.path], "compaction"]
        again = [text_of(goes_on), text_of(ENDS)]
        assert await samples(session) == [("main", [text_of(RUNS), text_of(ENDS)]), ("main", again)]
        trained = num_tokens(RUNS, ENDS, goes_on, ENDS)
        assert await settled(session) == {"trained": trained, "role": num_tokens(summary)}


def _compacting(agent: Thread) -> Thread:
    """The request for a summary: of the agent itself, of another agent, or of it without its tools."""
    session, cli, said = agent.session, agent.cli, list(agent.said)
    if cli is CLAUDE_CODE:
        asks = (
            "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\nCreate a summary of the conversation so far."
        )
        return Thread(session, cli, AGENT, said=[*said, cli.user(asks)])
    if cli is OPENCODE:
        asks = "Write a prompt for continuing our conversation above: a summary for another session."
        system = "You are a helpful AI assistant tasked with summarizing conversations."
        return Thread(session, cli, system, (), said=[*said, cli.user(asks)])
    asks = "Perform a CONTEXT CHECKPOINT COMPACTION. Write a handoff summary for another LLM that will go on."
    headers = codex_turn(SESSION, "compaction")
    return Thread(session, cli, AGENT, (), said=[*said, cli.user(asks)], headers=headers)


def _from_summary(agent: Thread, compacted: Thread) -> list[dict[str, Any]]:
    """How the conversation begins anew: the summary in a message of the user's, or as the reply that it was."""
    cli = agent.cli
    if cli is OPENCODE:
        return [cli.user("What did we do so far?"), compacted.said[-1], cli.user("Go on from there.")]
    kept = agent.said[:1] if cli is CODEX else []
    return [*kept, cli.user(f"This is a summary of what was done before:\n\n{SUMMARY}\n\nGo on from there.")]
