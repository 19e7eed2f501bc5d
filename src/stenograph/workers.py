"""Several gateway processes at one address, over one journal: one that ends is replaced, none outlives its supervisor.

A worker is `python -m stenograph.workers`. Its stdin is a line of what to do and then nothing: where that ends, whoever
started it wants it to end, or is gone. Its stdout is one line, when it takes requests or cannot.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import orjson
import uvloop

from stenograph.config import Config
from stenograph.errors import ConfigError, StenographError
from stenograph.gateway.server import MAX_WAITING, cannot_listen, new_admin_key
from stenograph.run import serve

_PAUSE_S = 1.0  # from one start of a worker to the next
_END_S = 15.0  # that a worker has to end in


async def supervise(config: Config, listening: Callable[[str, str], None]) -> None:
    """Run `gateway.num_processes` workers until SIGINT or SIGTERM; `listening` is told their URL and admin key.

    Raises what a worker that cannot start says: ConfigError, or StenographError.
    """
    stopped = asyncio.Event()
    with ExitStack() as stack:
        sockets = [stack.enter_context(one) for one in _bound(config.gateway.host, config.gateway.port)]
        admin_key = new_admin_key()
        workers = [_Worker(config, admin_key, sockets) for _ in range(config.gateway.num_processes)]
        keeping: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as group:
                starting = [group.create_task(worker.start()) for worker in workers]
            keeping += [asyncio.create_task(worker.keep()) for worker in workers]
            for name in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(name, stopped.set)
            listening(starting[0].result(), admin_key)
            await stopped.wait()
        except* StenographError as e:
            raise e.exceptions[0] from None  # one speaks for all
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*(worker.end() for worker in workers), *keeping, return_exceptions=True)


class _Worker:
    """A place among the workers, and the process that has it."""

    def __init__(self, config: Config, admin_key: str, sockets: Sequence[socket.socket]) -> None:
        self._handed = _handed(config, sockets)
        self._environment = {**os.environ, "STENO_ADMIN_KEY": admin_key}
        self._sockets = [one.fileno() for one in sockets]
        self._process: Process | None = None
        self._started_s = 0.0

    async def start(self) -> str:
        """Start a process; returns its URL when it takes requests. Raises what it says where it cannot."""
        self._started_s = time.monotonic()
        command = (sys.executable, "-m", "stenograph.workers")
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            env=self._environment,
            pass_fds=self._sockets,
            start_new_session=True,  # a terminal's Ctrl-C is the supervisor's
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(ConnectionError):  # then it says nothing either
            self._process.stdin.write(self._handed)
            await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            told = f"a gateway process ended with {await self._process.wait()} before it took requests"
            raise StenographError(f"{told}; see what it wrote above")
        said = orjson.loads(line)
        if "error" in said:
            raise (ConfigError if said["is_config"] else StenographError)(said["error"])
        return said["url"]

    async def keep(self) -> None:
        """Have another process for one that ended, again and again."""
        while True:
            assert self._process is not None
            told = f"gateway process {self._process.pid} ended with {await self._process.wait()}"
            print(f"steno: {told}; another takes its place", file=sys.stderr, flush=True)
            await asyncio.sleep(self._started_s + _PAUSE_S - time.monotonic())
            try:
                await self.start()
            except (StenographError, OSError) as e:  # and then again, for what ended has ended still
                print(f"steno: no gateway process takes its place yet: {e}", file=sys.stderr, flush=True)

    async def end(self) -> None:
        """Ask the process to end, then make it."""
        if self._process is None or self._process.returncode is not None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def _bound(host: str, port: int) -> list[socket.socket]:
    """Sockets that the workers share: the kernel gives a connection to one that is ready to take it.

    Connections wait in them while a worker is replaced.
    """
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address[0], port, *address[2:]))
            port = one.getsockname()[1]  # the same for every address of the host
            one.listen(MAX_WAITING)
            one.setblocking(False)
    except OSError as e:
        for one in sockets:
            one.close()
        raise cannot_listen(host, port, e) from e
    return sockets


def _handed(config: Config, sockets: Sequence[socket.socket]) -> bytes:
    """What a worker is told, on a pipe: others may read command lines."""
    values = config.model_dump(mode="json", exclude_none=True)
    if config.engine.api_key is not None:
        values["engine"]["api_key"] = config.engine.api_key.get_secret_value()
    return orjson.dumps({"config": values, "sockets": [one.fileno() for one in sockets]}) + b"\n"


def main() -> None:
    """Be a worker."""
    handed = orjson.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_when_told, daemon=True).start()
    try:
        config = Config.model_validate(handed["config"])
        sockets = [socket.socket(fileno=number) for number in handed["sockets"]]
        uvloop.run(serve(config, lambda url, _: _say({"url": url}), sockets))
    except StenographError as e:
        _say({"error": str(e), "is_config": isinstance(e, ConfigError)})
        sys.exit(1)


def _end_when_told() -> None:
    while os.read(sys.stdin.fileno(), 1):  # no buffer's lock, which would be held when the interpreter ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _say(said: dict[str, object]) -> None:
    print(orjson.dumps(said).decode(), flush=True)


if __name__ == "__main__":
    main()
