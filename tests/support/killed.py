"""Training runs that kill their own process where a phase begins, and runs that go on from what those have left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

# Whole runs, over and over: each in a process of its own, whose modules were loaded once for all of them.
PROGRAM = """
import json
import os
import signal
import sys
import traceback
from pathlib import Path

import uvloop

import stenograph.engines.local
import stenograph.loop
import transformers.models.llama
from stenograph.config_loading import load_config
from stenograph.resuming import resumed_config
from stenograph.run import train


class Killer:
    def __init__(self, phase, times):
        self.awaited, self.times = phase, times

    def phase(self, name):
        if name == self.awaited:
            self.times -= 1
            if self.times == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def step(self, row):
        self.phase("row")


def run(folder, config, phase, times):
    killer = Killer(phase, times)
    if config is None:
        settings = resumed_config(Path(folder), None)
    else:
        settings = load_config(Path(config))
    uvloop.run(train(settings, Path(folder), killer, lambda _: None, resumes=config is None))


for line in sys.stdin:
    pid = os.fork()
    if pid:
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    code = 1
    try:
        run(**json.loads(line))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
"""


@dataclass(frozen=True, slots=True)
class Run:
    """A new run with the `config`, in `folder`, or without one the run there resumed; killed where `phase` begins for
    the `times`-th time, if it does. A row of metrics counts as a phase, "row", once it is written.
    """

    folder: str
    config: str | None
    phase: str | None = None
    times: int = 1


class Runner:
    """Runs one after the other; `run` returns the exit code, negative for a signal."""

    def __init__(self, program: subprocess.Popen[str]) -> None:
        self._program = program

    def run(self, run: Run) -> int:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(json.dumps(asdict(run)) + "\n")
        self._program.stdin.flush()
        return int(self._program.stdout.readline())


@contextmanager
def runner(folder: Path) -> Iterator[Runner]:
    """What the runs say goes to `folder / "said"`."""
    with (
        (folder / "said").open("w") as said,
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
        ) as program,
    ):
        yield Runner(program)
        assert program.stdin is not None
        program.stdin.close()
