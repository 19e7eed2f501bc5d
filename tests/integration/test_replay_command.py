"""`steno replay` as a user runs it: an agent of real SDKs is recorded by one process and replayed by another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from support.serving import serving, write_script

STENO = str(Path(sys.executable).parent / "steno")
AGENT = """
import json, os, sys, threading
import anthropic, openai

results = {}
asks = sys.argv[1:] or ["What is 2 + 3?"]
tool = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}


def chat(client, question, stream):
    messages = [{"role": "user", "content": question}]
    while True:
        asked = {"model": "m", "messages": messages, "tools": [{"type": "function", "function": tool}]}
        if stream:
            with client.chat.completions.stream(**asked) as events:
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**asked)
        message = answer.choices[0].message
        print(answer.id, message.content, [call.id for call in message.tool_calls or ()])
        if not message.tool_calls:
            return
        messages.append(message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "sum=5"} for call in message.tool_calls]


def respond(client, question):
    asked = {"model": "m", "instructions": "Be brief.", "tools": [{"type": "function", "strict": False, **tool}]}
    first = client.responses.create(input=question, **asked)
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sum=5"}
    last = client.responses.create(input=[result], previous_response_id=first.id, **asked)
    print(first.id, call.call_id, last.id, last.output_text)


def message(client, question):
    asked = {"model": "m", "max_tokens": 500, "system": f"You help with {question}"}
    with client.messages.stream(messages=[{"role": "user", "content": question}], **asked) as events:
        answer = events.get_final_message()
    results[question] = answer.model_dump_json()


for question in asks:
    with openai.OpenAI() as client:
        chat(client, question, stream=False)
        chat(client, question, stream=True)
        respond(client, question)
    with anthropic.Anthropic() as client:
        workers = [threading.Thread(target=message, args=(client, f"{question} {n}")) for n in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
print(sorted(results.items()))
"""
LINES: list[dict[str, Any]] = [
    {"when": "sum=5", "reasoning": "Five.", "content": "It is five."},
    {"when": "+ 3", "reasoning": "A sum.", "content": "Let me see.", "tool_calls": [{"name": "add", "arguments": {}}]},
]


@dataclass(frozen=True, slots=True)
class Run:
    """A recorded run: its folder, its sessions, the program of the agent that had one, and what that printed."""

    folder: Path
    session: str
    empty: str
    agent: str
    printed: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    agent = folder / "agent.py"
    agent.write_text(AGENT)
    script = write_script(folder / "script.jsonl", *LINES)
    with serving("--engine", script, "--store", f"sqlite:{folder}/traces.db") as server:
        session = server.open()
        environment = os.environ | {
            "OPENAI_BASE_URL": session["base_url"] + "/v1",
            "OPENAI_API_KEY": session["api_key"],
            "ANTHROPIC_BASE_URL": session["base_url"],
            "ANTHROPIC_API_KEY": session["api_key"],
        }
        done = subprocess.run([sys.executable, agent], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        empty = server.open()
    return Run(folder, session["id"], empty["id"], str(agent), done.stdout)


def replay(run: Run, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, the lines of stdout, and stderr."""
    command = [STENO, "replay", str(run.folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_the_same_agent_prints_the_same(run: Run) -> None:
    code, [ready, done], printed = replay(run, "--session", run.session, "--", sys.executable, run.agent)
    assert printed == run.printed
    assert ready["session"]["base_url"] == f"{ready['url']}/s/{ready['session']['id']}"
    assert done == {
        "replayed": 9, "recorded": 9, "missed": 0, "repeated": 0, "cut": 0, "difference": None, "exit_code": 0,
    }  # fmt: skip
    assert code == 0


def test_another_agent_fails_and_the_first_request_that_differs_is_said(run: Run) -> None:
    agent = [sys.executable, run.agent, "What is 4 + 3?"]
    code, [_, told, done], printed = replay(run, "--session", run.session[:20], "--", *agent)
    assert (told["difference"]["cause"], told["difference"]["field"]) == ("message_changed", "content")
    assert (told["difference"]["before"], told["difference"]["after"]) == ("What is 2 + 3?", "What is 4 + 3?")
    assert "BadRequestError" in printed
    assert (code, done["difference"], done["replayed"]) == (1, told["difference"], 0)
    assert done["exit_code"] == 1


def test_an_agent_that_does_not_ask_for_all_of_it_fails(run: Run) -> None:
    code, [_, done], _ = replay(run, "--session", run.session, "--", "true")
    assert (code, done["missed"], done["difference"], done["exit_code"]) == (1, 9, None, 0)


def test_an_agent_that_fails_by_itself_fails_the_replay(run: Run) -> None:
    code, [_, done], _ = replay(run, "--session", run.session, "--", sys.executable, "-c", "raise SystemExit(3)")
    assert (code, done["exit_code"], done["difference"]) == (1, 3, None)


@contextmanager
def replaying(run: Run, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Mapping[str, Any]]]:
    command = [STENO, "replay", str(run.folder), "--session", run.session, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_without_an_agent_it_serves_until_it_is_told_to_end(run: Run, name: signal.Signals) -> None:
    with replaying(run) as (process, ready):
        session = ready["session"]
        with openai.OpenAI(base_url=session["base_url"] + "/v1", api_key=session["api_key"], max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="not in the record"):
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
        process.send_signal(name)
        rest, _ = process.communicate(timeout=20)
        told, done = map(json.loads, rest.splitlines())
        assert done["difference"] == told["difference"]
        assert process.returncode == 1


def test_the_limit_of_the_engine_may_be_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENO_ENGINE__CONTEXT_LENGTH", "5")
    with replaying(run) as (_, ready):
        session = ready["session"]
        with openai.OpenAI(base_url=session["base_url"] + "/v1", api_key=session["api_key"], max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="maximum context length is 5 tokens"):
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])


def test_an_agent_that_hangs_ends_with_the_replay(run: Run) -> None:
    hangs = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    with replaying(run, "--", sys.executable, "-c", hangs) as (process, _):
        time.sleep(0.5)  # for the agent to be deaf
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=20)
        assert (json.loads(rest)["exit_code"], process.returncode) == (-signal.SIGKILL, 1)


BAD = {
    "unknown session": (["--session", "steno_nothing"], "no such session"),
    "many sessions": (["--session", "steno_"], "2 sessions begin so"),
    "no session": ([], "--session"),
    "no port": (["--session", "steno_", "--port", "99999"], "--port"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(run: Run, case: str) -> None:
    arguments, told = BAD[case]
    code, lines, errors = replay(run, *arguments)
    assert (code, lines, errors.count("\n")) == (2, [], 1)
    assert told in errors


def test_a_session_without_turns_is_bad_input(run: Run) -> None:
    code, lines, errors = replay(run, "--session", run.empty)
    assert (code, lines, "no recorded turn" in errors) == (2, [], True)
