"""Tasks from any source are checked when a run starts: a bad one is named by its file and line."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from stenograph.config import JudgeConfig, TasksConfig
from stenograph.errors import ConfigError, boundary
from stenograph.imports import load_callable
from stenograph.types import Task

_FIELDS = {"id", "prompt", "answer", "data", "sandbox", "judge"}


def load_tasks(config: TasksConfig, section: str = "tasks") -> list[Task]:
    """All tasks of the source that `config` names. Raises ConfigError naming the setting below `section`."""
    if config.dataset is not None:
        tasks = _from_dataset(config.dataset, config, section)
    elif config.path is not None:
        tasks = _from_file(config.path, section)
    elif config.callable is not None:
        tasks = _from_callable(config.callable, config, section)
    else:
        raise ConfigError(f"[{section}] names no source; set dataset, path or callable")
    source = config.dataset or config.path or config.callable
    if not tasks:
        raise ConfigError(f"[{section}] is empty: {source} holds no tasks")
    if twice := [id for id, count in Counter(task.id for task in tasks).items() if count > 1]:
        raise ConfigError(f"[{section}]: {source} has more than one task with the id {twice[0]!r}; results go by id")
    return tasks


def _from_dataset(name: str, config: TasksConfig, section: str) -> list[Task]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as e:
        raise ConfigError(f"{section}.dataset needs the package reasoning-gym: pip install 'stenograph[tasks]'") from e
    if name not in DATASETS:
        close = ", ".join(difflib.get_close_matches(name, DATASETS, n=3)) or "none"
        raise ConfigError(f"{section}.dataset: reasoning-gym has no {name!r}; close matches: {close}")
    with boundary(ConfigError, f"make {section}.dataset {name!r} with {config.params}"):
        dataset = reasoning_gym.create_dataset(name, seed=config.seed, size=config.size, **config.params)
        entries = [dataset[i] for i in range(config.size)]
    return [
        Task(
            f"{name}-{i}",
            entry["question"],
            entry["answer"],
            {"dataset": name, "params": config.params, "_entry": entry},
        )
        for i, entry in enumerate(entries)
    ]


def _from_file(path: Path, section: str) -> list[Task]:
    try:
        lines = path.read_bytes().split(b"\n")  # str.splitlines would cut at U+2028, which JSON allows in a text
    except OSError as e:
        raise ConfigError(f"{section}.path: cannot read {path}: {e}; give a JSONL file of tasks") from e
    tasks = []
    for n, line in enumerate(lines, 1):
        if line.strip():
            try:
                raw = orjson.loads(line)
            except orjson.JSONDecodeError as e:
                raise ConfigError(f"{path}:{n}: not JSON: {e}") from e
            tasks.append(_task(raw, f"{path}:{n}"))
    return tasks


def _from_callable(name: str, config: TasksConfig, section: str) -> list[Task]:
    make = load_callable(name, f"{section}.callable")
    with boundary(ConfigError, f"make tasks with {name}"):
        made = list(islice(make(seed=config.seed, size=config.size, **config.params), config.size))
    return [_task(_fields(task), f"{name}[{i}]") for i, task in enumerate(made)]


def _fields(task: Any) -> Any:
    """A callable may make Tasks; they are checked like what a file says."""
    return {name: getattr(task, name) for name in _FIELDS} if isinstance(task, Task) else task


def _task(raw: Any, where: str) -> Task:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: a task is an object, got {type(raw).__name__}")
    if unknown := set(raw) - _FIELDS:
        raise ConfigError(f"{where}: unknown field {sorted(unknown)[0]!r}; known: {', '.join(sorted(_FIELDS))}")
    for name in ("id", "prompt"):
        if not isinstance(raw.get(name), str):
            raise ConfigError(f"{where}: {name} must be a text, got {raw.get(name)!r}")
    answer = raw.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise ConfigError(f"{where}: answer must be a text, got {answer!r}")
    for name in ("data", "sandbox", "judge"):
        if not isinstance(raw.get(name), Mapping | None):
            raise ConfigError(f"{where}: {name} must be an object, got {raw[name]!r:.200}")
    if raw.get("sandbox") is not None:
        raise ConfigError(f"{where}: sandbox: agents run without one as yet; remove it, or the task would not get it")
    judge = raw.get("judge")
    if judge is not None:
        try:
            JudgeConfig.model_validate(judge)
        except ValidationError as e:
            first = e.errors()[0]
            field = ".".join(str(x) for x in ("judge", *first["loc"]))
            raise ConfigError(f"{where}: {field}: {first['msg'].removeprefix('Value error, ')}") from e
    return Task(raw["id"], raw["prompt"], answer, raw.get("data") or {}, raw.get("sandbox"), judge)
