"""What goes by a task's id, and what a callable's own Tasks may hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stenograph.config import TasksConfig
from stenograph.errors import ConfigError
from stenograph.tasks import load_tasks, tasks_for_step
from stenograph.types import Task


def test_two_tasks_of_one_id_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"id": id, "prompt": "p"}) + "\n" for id in "aba"))
    with pytest.raises(ConfigError, match=r"\[tasks\]: .*tasks\.jsonl has more than one task with the id 'a'"):
        load_tasks(TasksConfig(path=file))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ("id=7, prompt='p'", "id must be a text, got 7"),
        ("id='a', prompt='p', answer=7", "answer must be a text, got 7"),
        ("id='a', prompt='p', judge={'kind': 'best'}", r"judge\.kind"),
    ],
)
def test_a_callables_own_tasks_are_checked(tmp_path: Path, fields: str, told: str) -> None:
    module = tmp_path / "made.py"
    source = "from stenograph.types import Task\ndef make(seed, size): yield Task(id='0', prompt='p'); yield Task({})\n"
    module.write_text(source.format(fields))
    with pytest.raises(ConfigError, match=rf"made\.py:make\[1\]: {told}"):
        load_tasks(TasksConfig(callable=f"{module}:make"))


def test_any_seed_gives_an_order() -> None:
    tasks = [Task(str(n), "p") for n in range(20)]
    orders = [tuple(t.id for t in tasks_for_step(tasks, 0, 20, seed=seed, shuffle=True)) for seed in (-1, 0, 1, 2**70)]
    assert all(sorted(order) == sorted(t.id for t in tasks) for order in orders)
    assert len(set(orders)) >= 3
