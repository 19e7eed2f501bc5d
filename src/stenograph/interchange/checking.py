"""A row from a file, in the types that rows have, or one line that says which row and column is not."""

from __future__ import annotations

import math
import re
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from stenograph.errors import ConfigError
from stenograph.interchange.columns import ExpertsRow, Row

_ARRAYS = {"ids": np.int32, "loss_mask": np.uint8, "rollout_logprobs": np.float32, "versions": np.int32}


def checked(row: object) -> Row:
    """Raises ConfigError naming the column."""
    try:
        found = cast("dict[str, Any]", msgspec.convert(_as_written(row), Row))
    except msgspec.ValidationError as e:
        raise ConfigError(f"{e}; write what docs/interchange.md says stands there") from None
    for column, dtype in _ARRAYS.items():
        found[column] = _array(found[column], dtype, column)
        if (num := len(found[column])) != len(found["ids"]):
            raise ConfigError(f"{column} has {num} entries for {len(found['ids'])} ids; give one for each")
    if found["experts"] is not None:
        found["experts"] = _experts(found["experts"], len(found["ids"]))
    for reward in (found["reward"], *(turn["reward"] for turn in found["turns"])):
        if reward is not None and not math.isfinite(reward):
            raise ConfigError(f"a reward is {reward}; give a finite number, or null where there is none")
    return cast("Row", found)


def difference(row: Row, other: Row) -> str | None:
    """The first column in which two rows differ."""
    return next((name for name in Row.__annotations__ if not _equal(row[name], other[name])), None)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    return one == other


def _as_written(row: object) -> object:
    """A row as it is written now, whatever it holds otherwise.

    Arrow gives every message all the fields, and those that are not there are null. In files that were exported before
    turns had rewards, they have none.
    """
    if not isinstance(row, dict):
        return row
    changed = {name: [change(one) for one in row[name]] for name, change in _CHANGES if isinstance(row.get(name), list)}
    return row | changed


def _without_nulls(message: object) -> object:
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if value is not None}


def _with_reward(turn: object) -> object:
    return {"reward": None, **turn} if isinstance(turn, dict) else turn


_CHANGES = (("messages", _without_nulls), ("turns", _with_reward))


def _array(value: object, dtype: type[np.generic], column: str) -> NDArray[Any]:
    """A flat array of numbers, none of them changed for being of `dtype`."""
    try:
        given = np.asarray(value)
    except ValueError:
        given = np.empty((0, 0))  # of lists that differ in length
    if given.ndim != 1 or (len(given) and given.dtype.kind not in ("biuf" if dtype is np.float32 else "biu")):
        raise ConfigError(f"{column} is no list of {np.dtype(dtype).name}; give a number for each id")
    array = given.astype(dtype)
    exact = np.isfinite(array) if dtype is np.float32 else array == given
    if not exact.all():
        at = int(np.argmin(exact))
        raise ConfigError(f"{column}[{at}] is {given[at]}, which is no {np.dtype(dtype).name}; give a number that is")
    return array


def _experts(row: ExpertsRow, num_tokens: int) -> ExpertsRow:
    mask, shape = _array(row["mask"], np.uint8, "experts.mask"), row["shape"]
    if not re.fullmatch(r"u?int(8|16|32|64)", row["dtype"]):
        raise ConfigError(f"experts.dtype is {row['dtype']}; give a type of integers, such as uint8")
    if len(shape) != 3 or min(shape) < 0 or shape[0] != num_tokens or len(mask) != num_tokens:
        told = f"experts of shape {shape} and a mask of {len(mask)} for {num_tokens} ids"
        raise ConfigError(f"{told}; give [ids, layers, experts per token] and a mask entry for each id")
    if len(row["data"]) != (num_bytes := int(np.prod(shape)) * np.dtype(row["dtype"]).itemsize):
        raise ConfigError(f"experts.data has {len(row['data'])} bytes; its shape and dtype make {num_bytes}")
    return {**row, "mask": mask}
