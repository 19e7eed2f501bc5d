"""Rows as Arrow: one schema for Parquet and for `datasets`, the same whatever the rows hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from stenograph.interchange.columns import Row

_TEXT, _TEXTS = pa.string(), pa.list_(pa.string())
_EXPERTS = pa.struct(
    {"dtype": _TEXT, "shape": pa.list_(pa.int32()), "data": pa.binary(), "mask": pa.list_(pa.uint8())},
)
_SAMPLING = pa.struct(
    {
        "temperature": pa.float64(),
        "top_p": pa.float64(),
        "top_k": pa.int64(),
        "min_p": pa.float64(),
        "presence_penalty": pa.float64(),
        "frequency_penalty": pa.float64(),
        "repetition_penalty": pa.float64(),
        "max_tokens": pa.int64(),
        "stop": _TEXTS,
        "seed": pa.int64(),
        "constrained": pa.bool_(),
    }
)
_TURN = pa.struct(
    {
        "turn": _TEXT,
        "start": pa.int32(),
        "end": pa.int32(),
        "role": _TEXT,
        "role_evidence": _TEXT,
        "ended_by": _TEXT,
        "finish_reason": _TEXT,
        "stopped_by": _TEXT,
        "sampling": _SAMPLING,
        "temperature": pa.float64(),
        "top_p": pa.float64(),
        "logprobs_mode": _TEXT,
        "accepted": _TEXTS,
        "notes": _TEXTS,
        "started_s": pa.float64(),
        "seconds": pa.float64(),
        "reward": pa.float64(),
    }
)
_CALL = pa.struct({"id": _TEXT, "type": _TEXT, "function": pa.struct({"name": _TEXT, "arguments": _TEXT})})
_MESSAGE = pa.struct(
    {
        "role": _TEXT,
        "content": _TEXT,
        "reasoning_content": _TEXT,
        "tool_calls": pa.list_(_CALL),
        "tool_call_id": _TEXT,
        "name": _TEXT,
        "turn": _TEXT,
    }
)
SCHEMA = pa.schema(
    {
        "session": _TEXT,
        "branch": pa.int32(),
        "role": _TEXT,
        "rollout_id": _TEXT,
        "group_id": _TEXT,
        "task_id": _TEXT,
        "reward": pa.float64(),
        "status": _TEXT,
        "ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.uint8()),
        "rollout_logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(pa.int32()),
        "experts": _EXPERTS,
        "turns": pa.list_(_TURN),
        "messages": pa.list_(_MESSAGE),
        "tools": pa.list_(pa.struct({"name": _TEXT, "description": _TEXT, "parameters": _TEXT})),
        "metadata": _TEXT,
    }
)
_ARRAYS = ("ids", "loss_mask", "rollout_logprobs", "versions")  # never made to Python numbers, which takes long
NUM_READ = 64  # rows at once


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    columns = [pa.array([cast("Any", row)[field.name] for row in rows], field.type) for field in SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def rows_of(batch: pa.RecordBatch | pa.Table) -> Iterator[dict[str, Any]]:
    """The rows as they stand there, arrays as NumPy's."""
    arrays = {name: batch.column(name) for name in _ARRAYS if name in batch.schema.names}
    others = batch.select([name for name in batch.schema.names if name not in arrays]).to_pylist()
    for number, row in enumerate(others):
        yield row | {name: _numbers(column[number]) for name, column in arrays.items()}


def _numbers(cell: pa.Scalar) -> object:
    """An array, or what stands in its place."""
    if not isinstance(cell, pa.ListScalar) or cell.values is None:
        return cell.as_py()
    return cell.values.to_numpy(zero_copy_only=False)


def write_parquet(batches: Iterable[Sequence[Row]], path: Path) -> None:
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for rows in batches:
            writer.write_batch(batch_of(rows))


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=NUM_READ):
            yield from rows_of(batch)
