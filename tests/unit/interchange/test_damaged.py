"""A file that is damaged or from elsewhere is refused in one line that names its row and column."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from stenograph.config import SelectConfig
from stenograph.errors import ConfigError
from stenograph.interchange import files
from stenograph.interchange.columns import Row
from stenograph.interchange.importing import import_run, read_sessions
from stenograph.traces.session import Opening, SessionRecord
from support.records import rows_of
from support.turns import make_turn, user


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """Two branches of one session, with the first turn in common, and another session."""
    first, one = make_turn([1, 2], [3, 4], asked=[user("hi")], said="a"), make_turn([5], [6], asked=[user("b")])
    other = make_turn([7], [8], asked=[user("c")])
    record = SessionRecord(Opening("steno_1"))
    for parent, turn in [(None, first), (first.id, one), (first.id, other)]:
        record.commit(parent, [turn])
    lone = SessionRecord(Opening("steno_2"))
    lone.commit(None, [make_turn([1], [2], asked=[user("hi")])])
    select = SelectConfig(unadopted="keep")
    files.write([*rows_of(record, select), *rows_of(lone)], tmp_path / "whole", "jsonl")
    return [orjson.loads(line) for line in (tmp_path / "whole").read_bytes().splitlines()]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


CHANGES: dict[str, tuple[Callable[[list[Any]], object], str]] = {
    "missing column": (lambda rows: rows[1].pop("ids"), "row 2: Object missing required field `ids`"),
    "another type": (lambda rows: rows[1]["turns"][0].update(start="x"), r"row 2: .*\$\.turns\[0\]\.start"),
    "another role": (lambda rows: rows[1]["messages"][0].update(role="judge"), r"row 2: .*\$\.messages\[0\]\.role"),
    "no row": (lambda rows: rows.insert(1, 3), "row 2: Expected `object`, got `int`"),
    "text for ids": (lambda rows: rows[1].update(ids=["a"] * 6), "row 2: ids is no list of int32"),
    "halves for ids": (lambda rows: rows[1]["ids"].__setitem__(0, 1.5), "row 2: ids is no list of int32"),
    "too large an id": (lambda rows: rows[1]["ids"].__setitem__(0, 2**31), r"row 2: ids\[0\] is 2147483648"),
    "no log-probability": (
        lambda rows: rows[1]["rollout_logprobs"].__setitem__(0, None),
        "row 2: rollout_logprobs is no list of float32",
    ),
    "one too few": (lambda rows: rows[1]["versions"].pop(), "row 2: versions has 5 entries for 6 ids"),
    "experts": (
        lambda rows: rows[1].update(experts={"dtype": "uint8", "shape": [6, 1, 1], "data": "AA==", "mask": [0] * 6}),
        "row 2: experts.data has 1 bytes; its shape and dtype make 6",
    ),
    "experts are text": (
        lambda rows: rows[1].update(experts={"dtype": "text", "shape": [6, 1, 1], "data": "AA==", "mask": [0] * 6}),
        "row 2: experts.dtype is text",
    ),
    "not base64": (lambda rows: rows[1].update(experts={"data": "?"}), "could not read experts.data in line 2"),
    "another path": (lambda rows: rows[1]["ids"].__setitem__(2, 9), "row 2: column ids does not follow"),
    "a mask where nothing was sampled": (
        lambda rows: rows[1]["loss_mask"].__setitem__(0, 1),
        "row 2: column loss_mask",
    ),
    "half a mask": (lambda rows: rows[0]["loss_mask"].__setitem__(2, 0), "row 1: column loss_mask"),
    "a span beyond the end": (lambda rows: rows[2]["turns"][0].update(end=9), "row 3: column turns"),
    "another reply": (lambda rows: rows[1]["messages"][1].update(content="?"), "row 2: column messages"),
    "no mark": (lambda rows: [m.pop("turn", 0) for m in rows[2]["messages"]], "row 3: column messages"),
    "another reward": (lambda rows: rows[1].update(reward=3.0), "row 2: column reward"),
    "a turn's reward on one branch alone": (
        lambda rows: rows[1]["turns"][0].update(reward=3.0),
        "row 2: column turns does not follow",
    ),
    "another group": (lambda rows: rows[2].update(group_id="g"), "row 3: column group_id"),
    "no turns": (
        lambda rows: rows[2].update(turns=[]),
        "row 3: its session cannot be put together: a row has no turns",
    ),
    "metadata": (lambda rows: rows[2].update(metadata="[]"), "row 3: .* its metadata is no JSON object"),
    "no JSON": (lambda rows: rows[2].update(metadata="{"), "row 3: its session cannot be put together: unexpected end"),
    "deep metadata": (
        lambda rows: rows[2].update(metadata='{"a":' * 300 + "1" + "}" * 300),
        "row 3: its session cannot be put together: Recursion limit reached",
    ),
    "a branch of no number": (
        lambda rows: rows[2].update(branch=2**31),
        "row 3: its session cannot be put together: a branch has no number",
    ),
    "twice": (lambda rows: rows.insert(1, dict(rows[0])), "row 1: .* a branch is there twice"),
    "apart": (
        lambda rows: rows.append(rows.pop(0)),
        "row 3: session steno_1 again; put the rows of a session together",
    ),
    "a circle": (
        lambda rows: rows[0]["turns"].reverse(),
        "row 1: its session cannot be put together: turns go on from one another",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_row_is_refused_by_its_number_and_column(
    name: str, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    change, told = CHANGES[name]
    path = write(tmp_path / "file", rows)
    assert len(list(read_sessions(path))) == 2
    change(rows)
    with pytest.raises(ConfigError, match=told) as refused:
        list(read_sessions(write(path, rows)))
    assert str(path) in str(refused.value)
    assert "; " in str(refused.value) or name == "not base64", "and says the remedy"


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content, told in {
        b"[model]\n": "could not read line 1 of",
        b"PAR1 and no more": "could not read .* as parquet",
        b'{"session": "steno_1", "bra': "could not read line 1 of",
    }.items():
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=told):
            list(read_sessions(path))
    with pytest.raises(ConfigError, match=r"could not read .* as hf"):
        list(read_sessions(tmp_path))
    with pytest.raises(ConfigError, match="does not exist; give a file that `steno export` wrote"):
        list(read_sessions(tmp_path / "none"))


def test_a_refused_import_leaves_no_journal(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    rows[2]["ids"].pop()
    with pytest.raises(ConfigError, match=re.escape("row 3: loss_mask has 2 entries for 1 ids")):
        import_run(write(tmp_path / "file", rows), tmp_path / "run" / "traces.db")
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "file"}


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_reward_that_is_no_finite_number_is_refused(
    number: float, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    for held in (rows[2], rows[2]["turns"][0]):  # JSON holds none, so that a journal would lose it
        held["reward"] = number
        files.write(cast("list[Row]", rows), tmp_path / "file", "parquet")
        with pytest.raises(ConfigError, match=f"row 3: a reward is {number}; give a finite number, or null"):
            list(read_sessions(tmp_path / "file"))
        held["reward"] = None
