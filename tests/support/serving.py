"""A real gateway process, as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai


@dataclass(frozen=True)
class Server:
    url: str
    admin_key: str
    process: subprocess.Popen[str]

    def call(self, method: str, path: str, body: object = None, key: str | None = None) -> Any:
        """JSON in, JSON out; raises urllib's HTTPError on a status."""
        return json.loads(self.raw(method, path, json.dumps(body).encode() if body is not None else None, key)[1])

    def raw(self, method: str, path: str, body: bytes | None, key: str | None = None) -> tuple[int, bytes]:
        request = urllib.request.Request(self.url + path, data=body, method=method)
        request.add_header("authorization", f"Bearer {key or self.admin_key}")
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read()

    def refused(self, method: str, path: str, body: bytes | None = None, key: str | None = None) -> tuple[int, Any]:
        """Status and error of a request that must fail."""
        try:
            status, _ = self.raw(method, path, body, key)
        except urllib.error.HTTPError as e:
            with e:
                return e.code, json.loads(e.read())["error"]
        raise AssertionError(f"{method} {path} answered {status}")

    def open(self, **body: Any) -> Mapping[str, Any]:
        return self.call("POST", "/sessions", body)

    def client(self, session: Mapping[str, Any]) -> openai.OpenAI:
        return openai.OpenAI(base_url=session["base_url"] + "/v1", api_key=session["api_key"], max_retries=0)


@contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    """With a journal of its own, unless one is named."""
    with TemporaryDirectory() as folder:
        with started("--store", f"sqlite:{folder}/traces.db", *arguments) as server:
            yield server


@contextmanager
def started(*arguments: str) -> Iterator[Server]:
    command = [str(Path(sys.executable).parent / "steno"), "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        ready = json.loads(process.stdout.readline())
        yield Server(ready["url"], ready["admin_key"], process)
    finally:
        process.terminate()
        try:
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.stdout.close()


def write_script(path: Path, *lines: Mapping[str, Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"scripted:{path}"
