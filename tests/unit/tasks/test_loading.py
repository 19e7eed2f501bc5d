"""Tasks from every source; what is wrong with one is said by file, line and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stenograph.config import TasksConfig
from stenograph.errors import ConfigError
from stenograph.tasks import load_tasks
from stenograph.types import Task


def write(path: Path, *lines: Any) -> TasksConfig:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return TasksConfig(path=path)


def test_a_file_of_tasks(tmp_path: Path) -> None:
    full = {"id": "b", "prompt": "q", "answer": "a", "data": {"n": 1}}
    config = write(tmp_path / "tasks.jsonl", {"id": "a", "prompt": "p"}, "", full | {"judge": {"kind": "exact"}})
    assert load_tasks(config) == [
        Task("a", "p"),
        Task("b", "q", "a", {"n": 1}, None, {"kind": "exact"}),
    ]


def test_a_line_separator_within_a_prompt_ends_no_line(tmp_path: Path) -> None:
    line = json.dumps({"id": "a", "prompt": "one\u2028two\x85three"}, ensure_ascii=False)
    (tmp_path / "tasks.jsonl").write_text(line + "\r\n", encoding="utf-8")
    (task,) = load_tasks(TasksConfig(path=tmp_path / "tasks.jsonl"))
    assert task.prompt == "one\u2028two\x85three"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not JSON"),
        ("[]", "a task is an object, got list"),
        ({"prompt": "p"}, "id must be a text, got None"),
        ({"id": 7, "prompt": "p"}, "id must be a text, got 7"),
        ({"id": "a"}, "prompt must be a text, got None"),
        ({"id": "a", "prompt": "p", "answer": 7}, "answer must be a text, got 7"),
        ({"id": "a", "prompt": "p", "data": [1]}, r"data must be an object, got \[1\]"),
        ({"id": "a", "prompt": "p", "sandbox": "x"}, "sandbox must be an object, got 'x'"),
        ({"id": "a", "prompt": "p", "sandbox": {"image": "x"}}, "sandbox: agents run without one as yet"),
        ({"id": "a", "prompt": "p", "judge": "exact"}, "judge must be an object, got 'exact'"),
        ({"id": "a", "prompt": "p", "judge": {"kind": "best"}}, r"judge\.kind: "),
        ({"id": "a", "prompt": "p", "judge": {"kind": "regex"}}, "judge: .*needs `pattern`"),
        ({"id": "a", "prompt": "p", "anwser": "7"}, "unknown field 'anwser'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, told: str) -> None:
    config = write(tmp_path / "tasks.jsonl", {"id": "a", "prompt": "p"}, line)
    with pytest.raises(ConfigError, match=rf"tasks\.jsonl:2: {told}"):
        load_tasks(config)


def test_a_source_without_tasks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[tasks\] is empty"):
        load_tasks(write(tmp_path / "tasks.jsonl", ""))
    with pytest.raises(ConfigError, match=r"evaluation\.tasks\.path: cannot read .*missing\.jsonl"):
        load_tasks(TasksConfig(path=tmp_path / "missing.jsonl"), "evaluation.tasks")
    with pytest.raises(ConfigError, match="set dataset, path or callable"):
        load_tasks(TasksConfig())


MODULE = """
from stenograph.types import Task

def mixed(seed, size, text):
    yield Task("a", text)
    yield {"id": "b", "prompt": f"{seed} {size}"}

def endless(seed, size):
    n = 0
    while True:
        yield {"id": str(n), "prompt": "p"}
        n += 1

def bad(seed, size):
    return [{"id": "a"}]

def broken(seed, size):
    raise RuntimeError("no tasks today")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "steno_test_tasks.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # restores sys.path afterwards
    return "steno_test_tasks"


def test_a_callable_makes_tasks(module: str) -> None:
    made = load_tasks(TasksConfig(callable=f"{module}:mixed", seed=3, size=9, params={"text": "p"}))
    assert made == [Task("a", "p"), Task("b", "3 9")]
    assert len(load_tasks(TasksConfig(callable=f"{module}:endless", size=5))) == 5


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mixed", "could not make tasks with steno_test_tasks:mixed: TypeError"),
        ("bad", r"steno_test_tasks:bad\[0\]: prompt must be a text"),
        ("broken", "RuntimeError: no tasks today"),
        ("mixd", r"tasks\.callable: steno_test_tasks has no function 'mixd'; close matches: mixed"),
    ],
)
def test_what_is_wrong_with_a_callable(module: str, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_tasks(TasksConfig(callable=f"{module}:{name}"))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no_such_module:f", "cannot import no_such_module: ModuleNotFoundError"),
        ("missing.py:f", "cannot import missing.py"),
        ("broken_module.py:f", "cannot import broken_module.py: NameError"),
        ("module", "write module:function"),
    ],
)
def test_what_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_module.py").write_text("undefined\n")
    with pytest.raises(ConfigError, match=rf"tasks\.callable: {told}"):
        load_tasks(TasksConfig(callable=name))


def test_a_dataset_of_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym")
    config = TasksConfig(dataset="chain_sum", params={"min_terms": 2, "max_terms": 2}, seed=5, size=3)
    tasks = load_tasks(config)
    assert [task.id for task in tasks] == ["chain_sum-0", "chain_sum-1", "chain_sum-2"]
    assert tasks == load_tasks(config)
    assert tasks != load_tasks(config.model_copy(update={"seed": 6}))
    assert all(task.prompt and task.answer for task in tasks)


def test_what_is_wrong_with_a_dataset() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(
        ConfigError, match=r"tasks\.dataset: reasoning-gym has no 'chain_sums'; close matches: chain_sum"
    ):
        load_tasks(TasksConfig(dataset="chain_sums"))
    with pytest.raises(ConfigError, match=r"tasks\.dataset 'chain_sum' with .*min_term"):
        load_tasks(TasksConfig(dataset="chain_sum", params={"min_term": 2}))
