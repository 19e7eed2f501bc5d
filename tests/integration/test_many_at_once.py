"""A thousand agents may come at the same time: what the system gives a process at first is no limit."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.serving import serving, write_script

SERVE_AND_COUNT = """
import gc, os, signal, sys, uvloop
from stenograph.config_loading import load_config
from stenograph.run import serve

def listening(url, admin_key):
    print(gc.get_freeze_count(), len(gc.get_objects()))
    os.kill(os.getpid(), signal.SIGTERM)

settings = ["engine.kind=scripted", f"engine.script={sys.argv[1]}", "gateway.port=0"]
uvloop.run(serve(load_config(None, settings), listening))
"""


def test_connections_wait_for_a_gateway_that_is_busy(tmp_path: Path) -> None:
    with serving("--engine", write_script(tmp_path / "script.jsonl", {"content": "x"})) as server, ExitStack() as stack:
        host, port = server.url.removeprefix("http://").split(":")
        server.process.send_signal(signal.SIGSTOP)
        stack.callback(server.process.send_signal, signal.SIGCONT)
        for _ in range(500):  # one that finds no place is not answered
            stack.enter_context(socket.create_connection((host, int(port)), timeout=5))


def test_a_gateway_opens_as_many_files_as_it_may(tmp_path: Path) -> None:
    with few_files(256), serving("--engine", write_script(tmp_path / "script.jsonl", {"content": "x"})) as server:
        allowed, most = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        assert allowed == min(most, 2**16)


def test_what_a_gateway_began_with_is_not_looked_through_for_garbage(tmp_path: Path) -> None:
    script = write_script(tmp_path / "script.jsonl", {"content": "x"}).partition(":")[2]
    done = subprocess.run([sys.executable, "-c", SERVE_AND_COUNT, script], capture_output=True, text=True, check=True)
    num_kept, num_looked_through = map(int, done.stdout.split())
    assert num_looked_through < num_kept / 100


@contextmanager
def few_files(num_files: int) -> Iterator[None]:
    """Allow no more to whatever is started meanwhile."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
