"""Whatever a session holds, its rows come back the same, by every format and from one to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.table import InMemoryTable

from stenograph.config import SelectConfig
from stenograph.interchange import files
from stenograph.interchange.checking import difference
from stenograph.interchange.columns import Row
from stenograph.interchange.importing import read_sessions
from stenograph.interchange.rows import session_rows
from stenograph.traces.session import Opening, SessionRecord
from stenograph.types import Message
from support.records import random_records, rows_of
from support.turns import make_turn, user

FORMATS = ("jsonl", "parquet", "hf")


def rows_at_random(seed: int, number: int) -> list[Row]:
    return [row for record, select in random_records(seed, number) for row in rows_of(record, select)]


def imported(path: Path) -> list[Row]:
    return [row for session in read_sessions(path) for row in session_rows(session.record(), session.read)]


def assert_equal(rows: Sequence[Row], others: Sequence[Row]) -> None:
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert difference(row, other) is None


def record_of(*commits: tuple[str | None, list]) -> SessionRecord:
    record = SessionRecord(Opening("steno_1", {"rollout_id": "r1"}))
    for parent, turns in commits:
        record.commit(parent, turns)
    return record


@pytest.mark.parametrize(("format", "number"), [("jsonl", 150), ("parquet", 100), ("hf", 20)])
def test_what_is_imported_exports_to_the_same_rows(format: str, number: int, tmp_path: Path) -> None:
    rows = rows_at_random(number, number)
    files.write(rows, tmp_path / "file", format)
    assert_equal(rows, imported(tmp_path / "file"))


def test_rows_are_the_same_from_one_format_to_the_next(tmp_path: Path) -> None:
    rows = rows_at_random(1, 20)
    files.write(rows, tmp_path / "first", FORMATS[0])
    for format, source in zip((*FORMATS[1:], "jsonl"), ("first", *FORMATS[1:]), strict=True):
        files.write(imported(tmp_path / source), tmp_path / format, format)
        assert_equal(rows, imported(tmp_path / format))
    assert (tmp_path / "jsonl").read_bytes() == (tmp_path / "first").read_bytes()


def test_the_sessions_at_random_have_all_there_is() -> None:
    """Or the tests above would prove less than they say."""
    records = list(random_records(100, 100))
    rows = [row for record, select in records for row in rows_of(record, select)]
    spans = [span for row in rows for span in row["turns"]]
    told = [{m["turn"] for m in row["messages"] if "turn" in m} for row in rows]
    held = [{span["turn"] for span in row["turns"]} for row in rows]
    branches = [b for record, _ in records if record.selection is not None for b in record.selection.branches]
    assert any(branch.truncated for branch in branches)
    assert any(span["start"] == span["end"] for span in spans)
    assert {span["reward"] for span in spans} == {None, -0.5, 0.0, 1 / 3}
    assert any(names - turns for names, turns in zip(told, held, strict=True)), "a turn that is only told"
    assert any(turns - names for names, turns in zip(told, held, strict=True)), "a turn that is only on the path"
    assert any(not turn.extends for record, _ in records for turn in record.tree.turns.values())
    assert any(row["experts"] is not None and row["experts"]["mask"].any() for row in rows)
    assert any(not row["loss_mask"].any() for row in rows)
    assert any(len({v for v in row["versions"].tolist() if v >= 0}) > 1 for row in rows)
    assert len({row["session"] for row in rows}) < len(rows)


def test_a_turn_on_several_branches_is_recorded_once(tmp_path: Path) -> None:
    first = make_turn([1, 2], [3, 4], asked=[user("hi")], said="hello")
    others = [make_turn([5], [6 + n], asked=[user(f"more {n}")], said="yes") for n in range(3)]
    record = record_of((None, [first]), *((first.id, [other]) for other in others))
    files.write(rows_of(record), tmp_path / "file", "jsonl")
    (session,) = read_sessions(tmp_path / "file")
    tree = session.record().tree
    assert list(tree.turns) == [first.id, *(other.id for other in others)]
    assert [tree.parent(other.id) for other in others] == [first.id] * 3
    assert [tree.turn(other.id).context_ids.tolist() for other in others] == [[5], [], []]  # told once, too


def test_a_fork_goes_on_from_the_conversation_and_not_from_the_ids(tmp_path: Path) -> None:
    first = make_turn([1, 2], [3, 4], asked=[user("hi")], said="hello")
    second = replace(make_turn([1, 2, 9], [6], asked=[user("more")], said="yes"), extends=False)
    record = record_of((None, [first]), (first.id, [second]))
    files.write(rows_of(record, SelectConfig(unadopted="keep")), tmp_path / "file", "parquet")
    (session,) = read_sessions(tmp_path / "file")
    tree = session.record().tree
    assert tree.parent(second.id) == first.id
    assert not tree.turn(second.id).extends
    assert tree.path_turns(second.id) == [second.id]
    assert tree.path_ids(second.id).tolist() == [1, 2, 9, 6]


def test_a_mark_is_given_to_what_was_sampled_alone() -> None:
    claimed = Message("assistant", "mine", turn="turn_of_a_client")
    turn = make_turn([1], [2], asked=[user("hi"), claimed, user("go on")], said="yes")
    (row,) = rows_of(record_of((None, [turn])))
    assert [message.get("turn") for message in row["messages"]] == [None, None, None, turn.id]


def test_a_turn_that_a_limit_cut_comes_back_as_it_was_cut(tmp_path: Path) -> None:
    turn = make_turn([1, 2], [3, 4, 5, 6], asked=[user("hi")], said="all of it")
    select = SelectConfig(max_tokens=4, overlong="truncate")
    files.write(rows_of(record_of((None, [turn])), select), tmp_path / "file", "jsonl")
    (row,) = imported(tmp_path / "file")
    assert row["ids"].tolist() == [1, 2, 3, 4]
    assert (row["turns"][0]["end"], row["turns"][0]["ended_by"]) == (4, "length")
    assert row["messages"][-1]["content"] == "all of it"


def without_rewards(path: Path) -> pa.Table:
    """A Parquet file as it was written before turns had rewards."""
    table = pq.read_table(path)
    at = table.schema.get_field_index("turns")
    kept = pa.struct([field for field in table.schema.field(at).type.value_type.fields if field.name != "reward"])
    return pa.Table.from_pylist(table.to_pylist(), table.schema.set(at, pa.field("turns", pa.list_(kept))))


def test_a_file_of_before_turns_had_rewards_is_read(tmp_path: Path) -> None:
    rows = rows_at_random(7, 5)
    files.write(rows, tmp_path / "now", "parquet")
    older = without_rewards(tmp_path / "now")
    pq.write_table(older, tmp_path / "parquet")
    files.write((cast("Row", row) for row in files.read(tmp_path / "parquet")), tmp_path / "jsonl", "jsonl")
    datasets.Dataset(InMemoryTable(older)).save_to_disk(tmp_path / "hf")
    for row in rows:
        row["turns"] = [{**turn, "reward": None} for turn in row["turns"]]
    for format in FORMATS:
        assert not any("reward" in turn for row in files.read(tmp_path / format) for turn in row["turns"])
        assert_equal(rows, imported(tmp_path / format))


def test_metadata_that_names_with_numbers_is_text_in_its_columns() -> None:
    record = SessionRecord(Opening("steno_1", {"rollout_id": 7, "task_id": "t", "more": [1.5]}))
    record.commit(None, [make_turn([1], [2], asked=[user("hi")])])
    (row,) = rows_of(record)
    assert (row["rollout_id"], row["group_id"], row["task_id"]) == ("7", None, "t")
    assert row["metadata"] == '{"rollout_id":7,"task_id":"t","more":[1.5]}'


def test_arrays_have_the_types_that_the_columns_promise(tmp_path: Path) -> None:
    rows = rows_at_random(5, 5)
    for format in FORMATS:
        files.write(rows, tmp_path / format, format)
        for row in imported(tmp_path / format):
            kinds = [row[name].dtype for name in ("ids", "loss_mask", "rollout_logprobs", "versions")]
            assert kinds == [np.int32, np.uint8, np.float32, np.int32]
