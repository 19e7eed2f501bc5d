"""`steno serve` as several processes: a session outlives the process that has it, and no process its supervisor."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError

import pytest

from support.agents.processes import alive
from support.serving import Server, started, write_script

T = TypeVar("T")
STENO = str(Path(sys.executable).parent / "steno")
LINES = (
    {"when": "weather", "content": "It rains."},
    {"when": "slow", "content": "One word after the other.", "fault": "pace:0.04"},
)


def settings(folder: Path) -> list[str]:
    engine, store = write_script(folder / "script.jsonl", *LINES), f"sqlite:{folder}/traces.db"
    return ["--engine", engine, "--store", store, "--set", "gateway.num_processes=2"]


def test_a_session_outlives_the_process_that_has_it(tmp_path: Path) -> None:
    with started(*settings(tmp_path)) as server:
        sessions = [server.open()]
        while len(set(owners(tmp_path).values())) < 2:  # a connection is taken by whichever process is quicker
            sessions.append(server.open())
        said = [{"role": "user", "content": "the weather?"}]
        for day in ("tomorrow", "after that"):
            assert {ask(server, session, said) for session in sessions} == {"It rains."}
            said += [{"role": "assistant", "content": "It rains."}, {"role": "user", "content": f"the weather {day}?"}]
        before = children(server.process.pid)
        assert len(before) == 2

        killed = process_of(tmp_path, before, owners(tmp_path)[sessions[0]["id"]])
        os.kill(killed, signal.SIGKILL)
        for session in sessions:
            assert soon(lambda key=session: ask(server, key, said)) == "It rains."
            turns = server.call("GET", f"/sessions/{session['id']}/tree")["turns"]
            first, second, third = [turn["id"] for turn in turns]
            assert [(turn["parent"], turn["extends"]) for turn in turns[1:]] == [(first, True), (second, True)]
            assert third
            assert server.call("GET", f"/sessions/{session['id']}/drift") == []
        until(lambda: len(children(server.process.pid)) == 2)
        assert killed not in children(server.process.pid)
        for session in sessions:
            path = f"/sessions/{session['id']}"
            assert server.call("POST", f"{path}/seal", {"reward": 1})["state"] == "sealed"
            assert server.call("DELETE", path) == {"released": [session["id"]]}
            assert server.refused("GET", path)[0] == 404


def test_a_stream_whose_process_dies_ends_in_an_error_and_none_is_lost_to_one_that_stands_still(tmp_path: Path) -> None:
    with started(*settings(tmp_path)) as server:
        session = server.open()
        processes = children(server.process.pid)
        owner = process_of(tmp_path, processes, owners(tmp_path)[session["id"]])
        os.kill(owner, signal.SIGSTOP)  # so that the other one gets the connection
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as client:
            body = json.dumps({"messages": [{"role": "user", "content": "slow"}], "stream": True}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session['api_key']}\r\n"
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):  # its owner lives, and keeps it
                client.recv(1)
            client.settimeout(20)
            os.kill(owner, signal.SIGCONT)
            answer = b""
            while b'"content":' not in answer:
                answer += client.recv(1000)
            os.kill(owner, signal.SIGKILL)
            while more := client.recv(1000):
                answer += more
        assert b"event: error" in answer
        assert b"[DONE]" not in answer
        assert not answer.endswith(b"0\r\n\r\n")
        assert soon(lambda: ask(server, session, [{"role": "user", "content": "slow"}])) == "One word after the other."
        assert len(server.call("GET", f"/sessions/{session['id']}/tree")["turns"]) == 1


def test_a_place_that_cannot_be_filled_at_once_is_filled_later(tmp_path: Path) -> None:
    with started(*settings(tmp_path)) as server:
        soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (8, hard))
        killed = children(server.process.pid)[0]
        os.kill(killed, signal.SIGKILL)
        until(lambda: killed not in children(server.process.pid))
        time.sleep(1.5)  # the next process cannot be started
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        until(lambda: len(children(server.process.pid)) == 2)


def test_the_processes_end_with_their_supervisor_however_it_ends(tmp_path: Path) -> None:
    command = [STENO, "serve", "--port", "0", *settings(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())
        workers = children(process.pid)
        assert len(workers) == 2
        process.kill()
    until(lambda: not any(map(alive, workers)))
    assert list(tmp_path.glob("*.lock")) == []  # they gave back what they had


def test_what_cannot_be_shared_or_started_is_told_once(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        for given, told in (
            (["--store", "memory"], 'needs a record that they share; set store.kind = "sqlite"'),
            (["--engine", "local"], 'would load the model of engine.kind = "local" once for each process'),
            (["--engine", "scripted:no-such-file"], "cannot read no-such-file"),
            (["--port", str(taken.getsockname()[1])], "Address already in use; choose another port"),
        ):
            command = [STENO, "serve", "--port", "0", *settings(tmp_path), *given]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert (done.returncode, done.stdout) == (2, "")
            (line,) = done.stderr.splitlines()
            assert told in line


def ask(server: Server, session: Mapping[str, Any], said: Sequence[Mapping[str, str]]) -> str:
    """By the session's key alone."""
    answer = server.call("POST", "/v1/chat/completions", {"messages": said}, session["api_key"])
    return answer["choices"][0]["message"]["content"]


def owners(folder: Path) -> dict[str, str]:
    with closing(sqlite3.connect(folder / "traces.db")) as connection:
        return dict(connection.execute("SELECT id, owner FROM sessions"))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def process_of(folder: Path, processes: Sequence[int], owner: str) -> int:
    """The process that holds the owner's lock."""
    lock = os.stat(folder / f"traces.db-{owner}.lock").st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        _, _, _, _, process, file, *_ = line.split()
        if int(process) in processes and file.endswith(f":{lock}"):
            return int(process)
    raise AssertionError(f"none of {processes} is {owner}")


def soon(ask: Callable[[], T], timeout_s: float = 20.0) -> T:
    """As a client does that tries again where a connection broke."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        try:
            return ask()
        except HTTPError:
            raise
        except (URLError, ConnectionError):
            time.sleep(0.05)
    return ask()


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)
