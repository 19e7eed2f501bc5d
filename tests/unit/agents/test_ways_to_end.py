"""Ways to end that would end us too, if they were let through; and lines that Python sees where nobody else does."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stenograph.agents import SessionHandle, load_agent
from stenograph.agents.remote import CallableAgent
from stenograph.config import AgentConfig, JudgeConfig
from stenograph.errors import AgentError, JudgeError
from stenograph.judges import load_judge
from stenograph.types import Outcome, Task
from support.agents.processes import there

SESSION = SessionHandle("steno_1", "http://gateway/s/steno_1", "the-key", "the-model")
TASK = Task("t", "1 + 1 = ?", "2")
Way = Callable[..., Awaitable[Any]]


async def cancels_its_own(*_: object) -> None:
    sleeping = asyncio.create_task(asyncio.sleep(60))
    sleeping.cancel()
    await sleeping


async def exits(*_: object) -> None:
    sys.exit(3)


async def groups(*_: object) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(fails())


async def fails() -> None:
    raise ValueError("in a group")


WAYS = [(cancels_its_own, "CancelledError"), (exits, "SystemExit"), (groups, "in a group")]


@pytest.mark.parametrize(("way", "told"), WAYS)
async def test_an_agents_end_is_its_own(way: Way, told: str) -> None:
    async with CallableAgent(way, 5).run(TASK, SESSION) as outcome:
        assert (outcome.answer, outcome.exit_code) == (None, 1)
        assert told in outcome.stderr


@pytest.mark.parametrize("name", ["cancels_its_own", "exits", "groups"])
async def test_a_judges_end_is_its_own(name: str) -> None:
    judge = load_judge(JudgeConfig(kind="callable", callable=f"{__file__}:{name}", timeout_s=5))
    with pytest.raises(JudgeError, match=name):
        await judge(TASK, Outcome("2", 0, "", "", "/", 0.0))


async def raises_instead(*_: object) -> None:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise ValueError("never") from None


async def answers_instead(*_: object) -> str:
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    return "all the same"


@pytest.mark.parametrize("way", [raises_instead, answers_instead])
async def test_cancelling_passes_whatever_an_agent_makes_of_it(way: Way) -> None:
    async def run() -> None:
        async with CallableAgent(way, 60).run(TASK, SESSION):
            raise AssertionError("there is nobody to hear of an outcome")

    running = asyncio.create_task(run())
    await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_cancelling_passes_whatever_a_judge_makes_of_it() -> None:
    judge = load_judge(JudgeConfig(kind="callable", callable=f"{__file__}:raises_instead"))
    running = asyncio.ensure_future(judge(TASK, Outcome("2", 0, "", "", "/", 0.0)))
    await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("way", [raises_instead, answers_instead])
async def test_a_timeout_is_one_whatever_an_agent_makes_of_it(way: Way) -> None:
    async with CallableAgent(way, 0.05).run(TASK, SESSION) as outcome:
        assert outcome.exit_code is None


@pytest.mark.parametrize("text", ["a\u2028b", "a\x85b", "a\x0cb", "a\vb"])
async def test_only_a_newline_ends_a_line(text: str) -> None:
    answer = f"import sys; sys.stdout.buffer.write({('first' + chr(10) + text + chr(13) + chr(10)).encode()!r})"
    async with load_agent(AgentConfig(command=("python", "-c", answer))).run(TASK, SESSION) as outcome:
        assert outcome.answer == text


async def test_a_verdict_may_hold_any_character(tmp_path: Path) -> None:
    verdict = '{"reward": 1, "parts": {}, "why": "a\u2028b"}'
    command = (sys.executable, "-c", f"import sys; sys.stdout.buffer.write({verdict.encode()!r})")
    judge = load_judge(JudgeConfig(kind="command", command=command))
    assert (await judge(TASK, Outcome("2", 0, "", "", str(tmp_path), 0.0))).reward == 1.0


@pytest.mark.parametrize("prompt", ["nul\0byte", "x" * 200_000, "\ud800"])
async def test_a_prompt_that_cannot_be_an_argument_is_ours_to_mend(prompt: str) -> None:
    with pytest.raises(AgentError, match="could not run"):
        async with load_agent(AgentConfig(command=("python", "-c", "", "{prompt}"))).run(Task("t", prompt), SESSION):
            pass


async def test_what_a_task_holds_reaches_the_agent_whatever_its_keys() -> None:
    code = "import json, os; print(json.load(open(os.environ['STENO_TASK']))['data'])"
    task = Task("t", "p", data={"graph": {1: (2, 3)}, "path": Path("/x")})
    async with load_agent(AgentConfig(command=("python", "-c", code))).run(task, SESSION) as outcome:
        assert outcome.answer == "{'graph': {'1': [2, 3]}, 'path': '/x'}"


@pytest.mark.parametrize("config", [AgentConfig(command=("true",)), AgentConfig(callable=f"{__file__}:exits")])
async def test_a_body_that_raises_finds_the_folder_gone(config: AgentConfig) -> None:
    folders = []

    async def body() -> None:
        async with load_agent(config).run(TASK, SESSION) as outcome:
            folders.append(outcome.workdir)
            assert there(outcome.workdir)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await body()
    assert not there(folders[0])
