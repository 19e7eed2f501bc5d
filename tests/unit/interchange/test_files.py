"""A file is there whole or not at all, and memory holds a batch of its rows."""

from __future__ import annotations

import os
import sqlite3
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stenograph.config import SelectConfig
from stenograph.errors import ConfigError, StenographError
from stenograph.interchange import files
from stenograph.interchange.columns import Row
from stenograph.interchange.exporting import export_run
from stenograph.traces.journal import Journal
from stenograph.traces.payloads import Holder
from stenograph.traces.session import Opening, SessionRecord
from stenograph.traces.sqlite import SqliteTraceStore
from support.records import rows_of
from support.turns import make_turn, user

FORMATS = ("jsonl", "parquet", "hf")


def some_row(num_tokens: int = 2) -> Row:
    record = SessionRecord(Opening("steno_1"))
    record.commit(None, [make_turn([1], range(num_tokens), asked=[user("hi")], said="yes")])
    return next(rows_of(record))


def failing(row: Row) -> Iterator[Row]:
    yield row
    raise StenographError("the journal is gone")


@pytest.mark.parametrize("format", FORMATS)
def test_an_export_that_fails_leaves_what_was_there_and_no_draft(format: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if format != "hf":
        path.write_text("before")
    with pytest.raises(StenographError, match="the journal is gone"):
        files.write(failing(some_row()), path, format)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == ({} if format == "hf" else {"file": "before"})


@pytest.mark.parametrize("format", FORMATS)
def test_what_a_killed_export_left_is_in_nobodys_way(format: str, tmp_path: Path) -> None:
    draft = tmp_path / "file.part"
    if format == "hf":
        draft.mkdir()
        (draft / "half").write_text("a half")
    else:
        draft.write_text("a half")
    files.write([some_row()], tmp_path / "file", format)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert len(list(files.read(tmp_path / "file"))) == 1


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_no_rows_are_a_file_with_none(format: str, tmp_path: Path) -> None:
    files.write([], tmp_path / "new" / "file", format)
    assert list(files.read(tmp_path / "new" / "file")) == []


def test_no_rows_are_no_dataset_for_nobody_could_load_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no rows to write"):
        files.write([], tmp_path / "data", "hf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_file_is_overwritten_and_a_folder_is_not(format: str, tmp_path: Path) -> None:
    for _ in range(2):
        files.write([some_row()], tmp_path / "file", format)
    with pytest.raises(ConfigError, match=f"--output {tmp_path} is a folder; name a file"):
        files.write([some_row()], tmp_path, format)


def test_a_dataset_takes_an_empty_folder_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    files.write([some_row()], tmp_path / "data", "hf")
    with pytest.raises(ConfigError, match="is there already; choose a new folder"):
        files.write([some_row()], tmp_path / "data", "hf")


def test_a_dataset_takes_the_folder_where_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files.write([some_row()], Path(), "hf")
    assert len(list(files.read(tmp_path))) == 1


def test_a_pipe_is_no_file_to_overwrite(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is a device or a pipe"):
        files.write([some_row()], tmp_path / "pipe", "jsonl")
    assert (tmp_path / "pipe").is_fifo()


def test_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--format csv: write one of jsonl, parquet, hf"):
        files.write([], tmp_path / "file", "csv")


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_memory_holds_a_batch_and_not_the_file(format: str, tmp_path: Path) -> None:
    row = some_row()
    num_tokens, num_rows = 2**15, 100
    arrays = {"ids": np.int32, "loss_mask": np.uint8, "rollout_logprobs": np.float32, "versions": np.int32}

    def rows() -> Iterator[Row]:
        for _ in range(num_rows):
            yield Row(**{**row, **{name: np.zeros(num_tokens, dtype) for name, dtype in arrays.items()}})

    tracemalloc.start()
    try:
        files.write(rows(), tmp_path / "file", format)
        if format == "parquet":  # JSON is read line by line, and slow to be watched
            assert sum(1 for _ in files.read(tmp_path / "file")) == num_rows
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < num_rows * num_tokens * 13 / 2  # bytes of all arrays


def test_a_session_whose_experts_are_damaged_is_left_out_and_one_whose_experts_were_freed_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(SqliteTraceStore(tmp_path / "traces.db")) as store:
        for session in ("damaged", "freed"):
            store.open(Opening(session))
            payload = store.payloads.put(np.zeros((2, 1, 1), np.uint8), Holder("session", session))
            store.commit(session, None, replace(make_turn([1, 2], [3, 4], asked=[user("hi")]), experts=payload))
        store.release(["freed"])
    with closing(sqlite3.connect(tmp_path / "traces.db")) as database, database:
        database.execute("UPDATE payloads SET data = x'0101'")
    with Journal.reading(tmp_path / "traces.db") as journal:
        counts = export_run(journal, tmp_path / "out.jsonl", "jsonl", SelectConfig())
    assert counts == {"sessions": 1, "rows": 1, "left_out": 1}
    assert "its checksum differs" in caplog.text
    (row,) = files.read(tmp_path / "out.jsonl")
    assert (row["session"], row["experts"]) == ("freed", None)
