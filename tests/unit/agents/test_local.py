"""Agent programs are real processes here: what they print, leave behind and start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from stenograph.agents import SessionHandle, load_agent
from stenograph.agents.local import CommandAgent
from stenograph.config import AgentConfig
from stenograph.errors import AgentError, ConfigError
from stenograph.types import Outcome, Task
from support.agents.processes import alive, gone, there, written

SESSION = SessionHandle("steno_1", "http://gateway/s/steno_1", "the-key", "the-model")
TASK = Task("t", "1 + 1 = ?", "2", {"level": 3})


@asynccontextmanager
async def attempt(code: str, *arguments: str, task: Task = TASK, **config: object) -> AsyncIterator[Outcome]:
    settings = AgentConfig.model_validate({"command": ("python", "-c", code, *arguments), "timeout_s": 20} | config)
    async with load_agent(settings).run(task, SESSION) as outcome:
        yield outcome


async def run(code: str, *arguments: str, task: Task = TASK, **config: object) -> Outcome:
    async with attempt(code, *arguments, task=task, **config) as outcome:
        return outcome


async def test_an_agent_gets_its_session_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENO_ADMIN_KEY", "secret")
    monkeypatch.setenv("MINE", "kept")
    outcome = await run("import os, json; print(json.dumps(dict(os.environ)))", environment=("PATH", "MINE"))
    environment = json.loads(outcome.stdout)
    expected = {
        "OPENAI_BASE_URL": "http://gateway/s/steno_1/v1",
        "ANTHROPIC_BASE_URL": "http://gateway/s/steno_1",
        "OPENAI_API_KEY": "the-key",
        "ANTHROPIC_API_KEY": "the-key",
        "OPENAI_MODEL": "the-model",
        "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",
        "MINE": "kept",
    }
    assert environment.items() >= expected.items()
    others = set(environment) - set(expected) - {"PATH", "STENO_TASK", "STENO_ANSWER", "LC_CTYPE"}
    assert not others


async def test_the_task_stands_in_a_file_without_what_would_give_it_away() -> None:
    task = Task("t", "1 + 1 = ?", "2", {"level": 3, "_entry": {"solution": "2"}}, judge={"kind": "exact"})
    outcome = await run("import os; print(open(os.environ['STENO_TASK']).read())", task=task)
    assert json.loads(outcome.stdout) == {"id": "t", "prompt": "1 + 1 = ?", "data": {"level": 3}, "sandbox": None}


async def test_the_prompt_is_one_argument_and_no_shell_reads_it() -> None:
    prompt = '\'; touch /tmp/x; echo "$HOME" {a} `id` \n--flag'
    outcome = await run(
        "import sys, json; print(json.dumps(sys.argv[1:]))", "ask={prompt}", "end", task=Task("t", prompt)
    )
    assert json.loads(outcome.stdout) == [f"ask={prompt}", "end"]


async def test_stdin_is_closed() -> None:
    assert (await run("import sys; print(repr(sys.stdin.read()))")).answer == "''"


async def test_the_answer_is_the_last_line_that_says_something() -> None:
    assert (await run("print('thinking'); print(' 42 '); print('  ')")).answer == "42"
    assert (await run("pass")).answer is None


async def test_the_answers_file_comes_before_stdout() -> None:
    code = "import os; open(os.environ['STENO_ANSWER'], 'w').write('from\\nthe file'); print('from stdout')"
    assert (await run(code)).answer == "from\nthe file"


async def test_a_failure_is_an_outcome() -> None:
    outcome = await run("import sys; print('partly'); sys.exit('what went wrong')")
    assert (outcome.exit_code, outcome.stderr.strip(), outcome.answer) == (1, "what went wrong", "partly")


async def test_the_folder_lives_as_long_as_the_context() -> None:
    async with attempt("open('made', 'w').write('here')") as outcome:
        assert (Path(outcome.workdir) / "made").read_text() == "here"
    assert not Path(outcome.workdir).parent.exists()


async def test_much_output_neither_blocks_the_agent_nor_loses_its_answer() -> None:
    code = "import sys; sys.stderr.write('e' * 3_000_000); print(('x' * 99 + '\\n') * 30_000); print('the answer')"
    outcome = await run(code, max_output_bytes=1000)
    assert (outcome.exit_code, outcome.answer) == (0, "the answer")
    assert outcome.stdout.startswith("[2999012 bytes before this were left out]\n")
    assert outcome.stderr.startswith("[2999000 bytes before this were left out]\n")
    assert len(outcome.stdout) < 1100


async def test_bytes_that_are_no_text_do_not_matter() -> None:
    assert (await run("import sys; sys.stdout.buffer.write(b'\\xff\\xfe 7')")).answer == "\ufffd\ufffd 7"


SPAWN = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']{}); "
SPAWN += "open(sys.argv[1], 'w').write(str(p.pid) + '\\n'); "


async def test_a_timeout_ends_the_agent_and_what_it_started(tmp_path: Path) -> None:
    code = SPAWN.format("") + "print('begun', flush=True); time.sleep(60)"
    outcome = await run(code, str(tmp_path / "pid"), timeout_s=2.0)
    assert (outcome.exit_code, outcome.stdout) == (None, "begun\n")
    assert 2.0 <= outcome.seconds < 6
    assert await gone(int(await written(tmp_path / "pid")))


async def test_an_agent_is_asked_to_end_before_it_is_made_to() -> None:
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('last words'))); "
    outcome = await run(code + "print('begun', flush=True); time.sleep(60)", timeout_s=2.0)
    assert (outcome.exit_code, outcome.stdout) == (None, "begun\nlast words\n")


async def test_an_agent_that_will_not_end_is_killed(tmp_path: Path) -> None:
    code = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    code += "open(sys.argv[1], 'w').write(str(os.getpid()) + '\\n'); time.sleep(60)"
    outcome = await run(code, str(tmp_path / "pid"), timeout_s=2.0)
    assert outcome.exit_code is None
    assert not alive(int((tmp_path / "pid").read_text()))


async def test_what_outlives_the_agent_ends_with_it(tmp_path: Path) -> None:
    outcome = await run(SPAWN.format("") + "print('done')", str(tmp_path / "pid"))
    assert (outcome.exit_code, outcome.answer) == (0, "done")
    assert outcome.seconds < 5
    assert await gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_daemon_that_left_the_group_does_not_hold_us(tmp_path: Path, runner: object) -> None:
    """It keeps stdout open: waiting for the end of that would take as long as the daemon likes."""
    assert callable(runner)
    began = time.monotonic()
    outcome = runner(run(SPAWN.format(", start_new_session=True") + "print('done')", str(tmp_path / "pid")))
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert isinstance(outcome, Outcome)
    assert (outcome.exit_code, outcome.answer) == (0, "done")
    assert time.monotonic() - began < 8


async def test_cancelling_ends_the_agent_and_its_folder(tmp_path: Path) -> None:
    code = SPAWN.format("") + "import os; open(sys.argv[2], 'w').write(os.getcwd() + '\\n'); time.sleep(60)"
    running = asyncio.create_task(run(code, str(tmp_path / "pid"), str(tmp_path / "cwd")))
    folder = (await written(tmp_path / "cwd")).strip()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await gone(int((tmp_path / "pid").read_text()))
    assert not there(folder)


def test_a_command_that_is_not_there_stops_at_start_up() -> None:
    with pytest.raises(ConfigError, match=r"agent\.command: 'no-such-program' is not found on PATH"):
        load_agent(AgentConfig(command=("no-such-program",)))


async def test_a_command_that_vanishes_is_an_agent_error() -> None:
    agent = CommandAgent(("/no/such/program",), AgentConfig())
    with pytest.raises(AgentError, match="/no/such/program"):
        async with agent.run(TASK, SESSION):
            pass


async def test_python_is_the_interpreter_that_runs_us() -> None:
    assert (await run("import sys; print(sys.executable)")).answer == sys.executable


async def test_a_relative_program_is_found_from_the_agents_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "agent.sh"
    program.write_text("#!/bin/sh\necho ran\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    async with load_agent(AgentConfig(command=("./agent.sh",))).run(TASK, SESSION) as outcome:
        assert outcome.answer == "ran"


def test_no_agent_is_an_error() -> None:
    with pytest.raises(ConfigError, match="set command, callable or url"):
        load_agent(AgentConfig())
