"""A run's folder: every record is appended and flushed when it is made, so that a crash loses nothing before it."""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import tomli_w

from stenograph.config import Config, SelectConfig
from stenograph.config_loading import load_config, recorded_config
from stenograph.errors import ConfigError, StenographError, boundary
from stenograph.traces.journal import Journal
from stenograph.traces.session import SessionRecord

JOURNAL = "traces.db"  # in a run's folder
LOCK = ".lock"  # in the folder of a run of steno train, from its beginning on


class RunDir:
    """Writes a run. Raises StenographError naming the path where the disk refuses."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def check(path: Path) -> None:
        """Raise ConfigError where a run cannot begin at `path`."""
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--run-dir {path} is a file; choose a new folder")
        if path.exists() and any(path.iterdir()):
            raise ConfigError(f"--run-dir {path} is not empty; choose a new folder")

    @classmethod
    def create(cls, path: Path, config: Config) -> RunDir:
        cls.check(path)
        run = cls(path)
        with boundary(StenographError, f"write {path}"):
            path.mkdir(parents=True, exist_ok=True)
        run.write("config.toml", written(config).encode())
        return run

    def reopen(self, config: Config) -> None:
        """Go on with the run under `config`. It is not over any more."""
        self.write("config.toml", written(config).encode())
        (self.path / "summary.json").unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Write the run alone, for as long as this process lives. Raises ConfigError where another does."""
        with boundary(StenographError, f"write {self.path / LOCK}"):
            descriptor = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise ConfigError(f"{self.path} is still running, in another process; end that one first") from e
            yield
        finally:
            os.close(descriptor)

    def mend(self) -> None:
        """Drop the last row of each file where a crash has cut it short; its end would be that of the next."""
        for path in self.path.glob("*.jsonl"):
            with boundary(StenographError, f"mend {path}"), path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)

    def sync(self) -> None:
        """Have on disk what was appended so far, so that what is written next does not outlive it."""
        for path in self.path.glob("*.jsonl"):
            with boundary(StenographError, f"write {path}"), path.open("rb") as file:
                os.fsync(file.fileno())

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a JSONL file so far."""
        return read_rows(self.path, name) if (self.path / name).exists() else []

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows to a JSONL file of the run."""
        text = b"".join(orjson.dumps(row, option=_OPTIONS) for row in rows)
        with boundary(StenographError, f"write {self.path / name}"), (self.path / name).open("ab") as file:
            file.write(text)
            file.flush()

    def write(self, name: str, content: bytes) -> None:
        """Write a file of the run, whole or not at all."""
        target = self.path / name
        draft = target.with_name(target.name + ".part")
        with boundary(StenographError, f"write {target}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(content)
            os.replace(draft, target)

    def write_json(self, name: str, payload: Mapping[str, Any]) -> None:
        self.write(name, orjson.dumps(payload, option=_OPTIONS | orjson.OPT_INDENT_2))

    def write_arrays(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        packed = io.BytesIO()
        np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
        self.write(name, packed.getvalue())


def written(config: Config) -> str:
    """A configuration as the TOML that gives it again."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def open_journal(run: Path) -> Journal:
    """The journal of a run, by its folder or by the file itself, to read. Raises ConfigError where there is none."""
    return Journal.reading(run if run.is_file() else run / JOURNAL)


def load_session(run: Path, name: str) -> SessionRecord:
    """The record of the session of `run` with this id, or the only one whose id begins so. Raises ConfigError."""
    with open_journal(run) as journal:
        sessions = journal.sessions()
        names = [name] if name in sessions else [session for session in sessions if session.startswith(name)]
        if len(names) > 1:
            raise ConfigError(f"--session {name}: {len(names)} sessions begin so; give more of the id")
        if not names:
            raise ConfigError(f"--session {name}: no such session in {run}; `steno inspect {run}` lists some")
        return journal.load(names[0])


def read_config(run: Path) -> Config:
    """The configuration that a run was recorded under. Raises ConfigError where there is none."""
    if (run / "config.toml").is_file():
        return load_config(run / "config.toml")
    with open_journal(run) as journal:
        config = journal.config()
    if config is None:
        raise ConfigError(f"{run} does not say what it was recorded under; put a config.toml with its [model] there")
    return recorded_config(config, run)


def read_select(run: Path) -> SelectConfig:
    """What of a run's sessions is selected, unless they were settled; the default, where the run does not say.

    A run that was imported does not: all its sessions are settled.
    """
    if not (run / "config.toml").is_file():
        with open_journal(run) as journal:
            if journal.config() is None:
                return SelectConfig()
    return read_config(run).select


_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS


def read_rows(run: Path, name: str) -> list[dict[str, Any]]:
    """Rows of a run's JSONL file. Raises ConfigError as `read_lines` does, and for a line that is no JSON."""
    with boundary(ConfigError, f"read {run / name}"):
        return [orjson.loads(line) for line in read_lines(run, name)]


def read_lines(run: Path, name: str) -> list[bytes]:
    """Lines of a run's JSONL file as they stand there; a last one that a crash cut short is left out.

    Raises ConfigError where `run` is not a run's folder.
    """
    path = run / name
    if not run.is_dir():
        raise ConfigError(f"{run} is not a folder; give the folder of a run")
    if not path.exists():
        raise ConfigError(f"{run} holds no {name}; is it the folder of a run that has finished a step?")
    return [line for line in path.read_bytes().split(b"\n")[:-1] if line]
