"""A file is there whole or not at all, and holds the same rows in every format; memory holds a batch of them."""

from __future__ import annotations

import os
import shutil
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import orjson

from stenograph.errors import ConfigError, StenographError, boundary
from stenograph.interchange.columns import Row

Format = Literal["jsonl", "parquet", "hf"]

_MOST_ROWS, _MOST_TOKENS = 1000, 2**19  # in a batch
_PARQUET = b"PAR1"  # what such a file begins with


def write(rows: Iterable[Row], path: Path, format: str) -> None:
    """Write `rows` to `path`, in place of a file that is there.

    Raises ConfigError for another format, or a path that cannot be one; StenographError where the disk refuses.
    """
    check(path, format)
    whole = path.absolute()  # with a name, "." too
    draft = whole.with_name(whole.name + ".part")
    with boundary(StenographError, f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(draft)  # of an export that was killed
        try:
            _writer(format)(_batches(rows), draft)
            os.replace(draft, whole)
        finally:
            _remove(draft)


def check(path: Path, format: str) -> None:
    """Raise ConfigError where `write` would."""
    if format not in get_args(Format):
        raise ConfigError(f"--format {format}: write one of {', '.join(get_args(Format))}")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"--output {path} is a device or a pipe, which cannot be overwritten; name a new file")
    if format == "hf" and path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"--output {path} is there already; choose a new folder for --format hf")
    if format != "hf" and path.is_dir():
        raise ConfigError(f"--output {path} is a folder; name a file for --format {format}")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file or folder of any of the formats, as they stand there.

    Raises ConfigError where it is none, or is damaged.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give a file that `steno export` wrote")
    with boundary(ConfigError, f"read {path} as {_format_of(path)}"):
        yield from _reader(_format_of(path))(path)


def _format_of(path: Path) -> Format:
    if path.is_dir():
        return "hf"
    with path.open("rb") as file:
        return "parquet" if file.read(len(_PARQUET)) == _PARQUET else "jsonl"


def _writer(format: str) -> Callable[[Iterable[Sequence[Row]], Path], None]:
    if format == "jsonl":
        return _write_jsonl
    with _extra(format):
        if format == "parquet":
            from stenograph.interchange.arrow import write_parquet

            return write_parquet
        from stenograph.interchange.hub import write_hf

        return write_hf


def _reader(format: Format) -> Callable[[Path], Iterator[dict[str, Any]]]:
    if format == "jsonl":
        return _read_jsonl
    with _extra(format):
        if format == "parquet":
            from stenograph.interchange.arrow import read_parquet

            return read_parquet
        from stenograph.interchange.hub import read_hf

        return read_hf


@contextmanager
def _extra(format: str) -> Iterator[None]:
    try:
        yield
    except ImportError as e:
        told = "pip install 'stenograph[export]', or use --format jsonl"
        raise ConfigError(f"{format} needs {e.name}, which is not installed; {told}") from e


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    num_tokens = 0
    for row in rows:
        batch.append(row)
        num_tokens += len(row["ids"])
        if len(batch) >= _MOST_ROWS or num_tokens >= _MOST_TOKENS:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch


def _write_jsonl(batches: Iterable[Sequence[Row]], path: Path) -> None:
    with path.open("wb") as file:
        for rows in batches:
            file.writelines(_line(row) for row in rows)


def _line(row: Row) -> bytes:
    experts = row["experts"]
    written = row if experts is None else {**row, "experts": {**experts, "data": b64encode(experts["data"]).decode()}}
    return orjson.dumps(written, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            with boundary(ConfigError, f"read line {number} of {path}"):
                row = orjson.loads(line)
            if isinstance(row, dict) and isinstance(experts := row.get("experts"), dict):
                with boundary(ConfigError, f"read experts.data in line {number} of {path}"):
                    experts["data"] = b64decode(experts["data"], validate=True)
            yield row


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
