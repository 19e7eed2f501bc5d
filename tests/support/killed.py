"""Training runs that kill their own process where a phase begins, and `steno` over and over, all from one program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

# Each in a process of its own, whose modules were loaded once for all of them.
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
from stenograph.cli import main
import transformers.models.llama
from stenograph.config_loading import load_config
from stenograph.resuming import resumed_config
from stenograph.run import train
from stenograph.training.checkpoints import Origin


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


def run(folder, config, phase, times, origin):
    killer = Killer(phase, times)
    origin = Origin.chosen(Path(origin), "weights") if origin else None
    if config is None:
        settings = resumed_config(Path(folder), None)
    else:
        settings = load_config(Path(config))
    uvloop.run(train(settings, Path(folder), killer, lambda _: None, resumes=config is None, origin=origin))


def steno(argv, out, error):
    for number, path in ((1, out), (2, error)):
        os.dup2(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
    sys.argv = ["steno", *argv]
    main()


for line in sys.stdin:
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    code = 1
    try:
        asked = json.loads(line)
        (steno if "argv" in asked else run)(**asked)
        code = 0
    except SystemExit as e:
        code = e.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
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
    origin: str | None = None  # the run that a new one begins with


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    error: str


class Runner:
    """One process after the other. Exit codes are negative for a signal."""

    def __init__(self, program: subprocess.Popen[str], folder: Path) -> None:
        self._program = program
        self._out, self._error = folder / "out", folder / "error"

    def run(self, run: Run) -> int:
        self._start(asdict(run))
        return self._number()

    def start(self, *argv: str) -> int:
        """Begin `steno` with these arguments; its process."""
        return self._start({"argv": argv, "out": str(self._out), "error": str(self._error)})

    def end(self) -> Done:
        """Of what was begun last."""
        return Done(self._number(), self._out.read_text(), self._error.read_text())

    def steno(self, *argv: str) -> Done:
        self.start(*argv)
        return self.end()

    def _start(self, asked: dict[str, object]) -> int:
        assert self._program.stdin is not None
        self._program.stdin.write(json.dumps(asked) + "\n")
        self._program.stdin.flush()
        return self._number()

    def _number(self) -> int:
        assert self._program.stdout is not None
        return int(self._program.stdout.readline())


@contextmanager
def runner(folder: Path) -> Iterator[Runner]:
    """What the runs say goes to `folder / "said"`."""
    with (
        (folder / "said").open("w") as said,
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},  # which is read when the modules are loaded
        ) as program,
    ):
        yield Runner(program, folder)
        assert program.stdin is not None
        program.stdin.close()
