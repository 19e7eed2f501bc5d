"""However a process ends, its whole group has ended with it, and nothing of it stays with us."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from stenograph.errors import ConfigError
from stenograph.processes import Finished, resolve_command, run_process
from support.agents.processes import alive, gone, written

Runner = Callable[[Coroutine[Any, Any, Any]], Any]
SH = "/bin/sh"


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Runner:
    """`steno` runs on uvloop, tests and users on asyncio: they differ in how a process's end is told."""
    return request.param


@pytest.fixture(scope="module", autouse=True)
def _what_uvloop_keeps() -> None:
    """Two descriptors, from the first process on, for as long as the program runs."""
    uvloop.run(run("true"))


@pytest.fixture(autouse=True)
def _nothing_stays_behind() -> Iterator[None]:
    descriptors = open_descriptors()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a ResourceWarning is raised where it can be seen
        yield
        gc.collect()
    assert not children()
    assert open_descriptors() <= descriptors


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> list[int]:
    """Ours that were not waited for, zombies included."""
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


async def run(script: str, *arguments: str, **options: Any) -> Finished:
    options = {"cwd": "/", "timeout_s": 20.0, "max_output_bytes": 10_000} | options
    return await run_process([SH, "-c", script, SH, *arguments], **options)


def test_a_process_that_ends(runner: Runner) -> None:
    assert runner(run("echo out; echo err >&2")) == Finished(0, "out\n", "err\n")
    assert runner(run("exit 7")) == Finished(7, "", "")
    assert runner(run("kill -SEGV $$")).exit_code == -signal.SIGSEGV


def test_a_program_that_cannot_be_started(runner: Runner, tmp_path: Path) -> None:
    for command, cwd in (("/no/such/program", "/"), (str(tmp_path), "/"), (SH, "/no/such/folder")):
        with pytest.raises(OSError, match=r"No such file|Permission denied"):
            runner(run_process([command], cwd=cwd, timeout_s=5, max_output_bytes=100))


def test_an_argument_that_is_too_long_is_an_error_of_the_start(runner: Runner) -> None:
    with pytest.raises(OSError, match="Argument list too long"):
        runner(run("true", "x" * 200_000))


def test_stdin_is_empty_or_what_was_given(runner: Runner) -> None:
    assert runner(run("cat")) == Finished(0, "", "")
    much = b"x" * 300_000
    assert runner(run("wc -c", stdin=much)).stdout.strip() == "300000"
    assert runner(run("true", stdin=much)).exit_code == 0  # never reads


def test_the_environment_is_what_was_given(runner: Runner) -> None:
    assert runner(run("/usr/bin/env", environment={"A": "1"})).stdout.split() >= ["A=1"]
    assert "HOME=" not in runner(run("/usr/bin/env", environment={"A": "1"})).stdout


@pytest.mark.parametrize(
    ("num_bytes", "dropped"), [(1000, 0), (1001, 1), (2000, 1000), (2001, 1001), (250_000, 249_000)]
)
def test_the_end_of_the_output_is_kept(num_bytes: int, dropped: int) -> None:
    code = f"import sys; sys.stdout.write('x' * ({num_bytes} - 4) + 'end\\n')"
    command = [sys.executable, "-c", code]
    done = asyncio.run(run_process(command, cwd="/", timeout_s=20, max_output_bytes=1000))
    told = f"[{dropped} bytes before this were left out]\n" if dropped else ""
    assert done.stdout == told + "x" * min(num_bytes - 4, 996) + "end\n"


def test_a_character_that_is_cut_does_no_harm() -> None:
    done = asyncio.run(run("printf 'äöü'; printf '\\377' >&2", max_output_bytes=3))
    assert done.stdout == "[3 bytes before this were left out]\n\ufffdü"
    assert done.stderr == "\ufffd"


# The group


def test_a_timeout_ends_the_group_and_keeps_what_was_said(runner: Runner, tmp_path: Path) -> None:
    script = 'sleep 60 & echo $! > "$1"; echo begun; wait'
    began = time.monotonic()
    assert runner(run(script, str(tmp_path / "pid"), timeout_s=0.5)) == Finished(None, "begun\n", "")
    assert time.monotonic() - began < 2
    assert asyncio.run(gone(int((tmp_path / "pid").read_text())))


def test_a_child_that_holds_the_pipes_does_not_hold_us(runner: Runner, tmp_path: Path) -> None:
    began = time.monotonic()
    assert runner(run('sleep 60 & echo $! > "$1"; echo done', str(tmp_path / "pid"))) == Finished(0, "done\n", "")
    assert time.monotonic() - began < 1.5
    assert asyncio.run(gone(int((tmp_path / "pid").read_text())))


def test_a_child_that_will_not_end_is_killed_after_its_parent(runner: Runner, tmp_path: Path) -> None:
    """The leader heeds SIGTERM, its child does not: the group is killed all the same."""
    script = 'sh -c \'trap "" TERM; sleep 60\' & echo $! > "$1"; wait'
    assert runner(run(script, str(tmp_path / "pid"), timeout_s=0.5)).exit_code is None
    assert asyncio.run(gone(int((tmp_path / "pid").read_text())))


def test_a_process_may_say_goodbye(runner: Runner) -> None:
    done = runner(run("trap 'echo bye; exit 0' TERM; echo hi; while :; do sleep 0.05; done", timeout_s=0.3))
    assert (done.exit_code, done.stdout) == (None, "hi\nbye\n")


async def cancelled(path: Path, times: int) -> tuple[int, float]:
    """Cancel a process that ignores SIGTERM; its id, and how long the end took."""
    script = "trap '' TERM; echo $$ > \"$1\"; while :; do sleep 0.05; done"
    running = asyncio.create_task(run(script, str(path)))
    pid = int(await written(path))
    began = time.monotonic()
    for _ in range(times):
        running.cancel()
        await asyncio.sleep(0.1)
    with pytest.raises(asyncio.CancelledError):
        await running
    return pid, time.monotonic() - began


def test_cancelling_waits_for_the_end(tmp_path: Path) -> None:
    pid, seconds = asyncio.run(cancelled(tmp_path / "pid", 1))
    assert not alive(pid)
    assert seconds < 4


def test_cancelling_twice_kills_at_once(runner: Runner, tmp_path: Path) -> None:
    pid, seconds = runner(cancelled(tmp_path / "pid", 2))
    assert not alive(pid)
    assert seconds < 1


def test_many_at_once(runner: Runner) -> None:
    async def many() -> list[Finished]:
        return await asyncio.gather(*(run('echo "$1"', str(n)) for n in range(40)))

    assert [done.stdout for done in runner(many())] == [f"{n}\n" for n in range(40)]


def test_no_descriptors_left_is_an_error_that_leaves_none_behind() -> None:
    async def starved() -> None:
        held = []
        try:
            with suppress(OSError):
                while True:
                    held.append(os.dup(0))
            for _ in range(4):  # enough for one pipe and a half, then for less
                os.close(held.pop())
                before = open_descriptors_by_number()
                with pytest.raises(OSError, match="Too many open files"):
                    await run("true")
                await asyncio.sleep(0.01)
                assert open_descriptors_by_number() == before
        finally:
            for descriptor in held:
                os.close(descriptor)

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        asyncio.run(starved())  # uvloop keeps one of its own when it fails to start a process
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def open_descriptors_by_number() -> list[int]:
    """Without opening one."""
    return [n for n in range(200) if _is_open(n)]


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


# Programs


def test_a_program_is_found_when_a_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text("#!/bin/sh\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"judge\.command: './mine' is not found on PATH; install it or give"):
        resolve_command(("./mine",), "judge.command")
    (tmp_path / "mine").chmod(0o755)
    assert resolve_command(("./mine", "x"), "s") == (str(tmp_path / "mine"), "x")
    monkeypatch.setenv("PATH", ".")
    assert resolve_command(("mine",), "s") == (str(tmp_path / "mine"),)
    assert resolve_command(("python", "-c"), "s") == (sys.executable, "-c")
    for nothing in ((), ("",)):
        with pytest.raises(ConfigError, match=r"agent\.command"):
            resolve_command(nothing, "agent.command")
