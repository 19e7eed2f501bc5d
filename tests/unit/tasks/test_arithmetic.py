"""The demo's tasks: the same for the same seed, none of the training's among the held-out, and solvable by its tool."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stenograph.config import TasksConfig
from stenograph.config_loading import load_config
from stenograph.imports import load_callable
from stenograph.tasks import load_tasks

FOLDER = Path(__file__).parents[3] / "examples" / "arithmetic"


def load(seed: int, size: int = 200) -> list[tuple[str, str | None]]:
    tasks = load_tasks(TasksConfig(callable=f"{FOLDER / 'tasks.py'}:make", seed=seed, size=size))
    assert len({task.id for task in tasks}) == size
    return [(task.prompt, task.answer) for task in tasks]


def test_the_tasks_are_seeded() -> None:
    assert load(1) == load(1)
    assert load(1) != load(2)
    assert load(1, 50) == load(1)[:50]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_held_out_tasks_are_none_of_the_training_ones(seed: int) -> None:
    config = load_config(FOLDER / "config.toml", [f"tasks.seed={seed}", "evaluation.tasks.size=64"])
    training, held_out = load_tasks(config.tasks), load_tasks(config.evaluation.tasks, "evaluation.tasks")
    assert not {task.prompt for task in training} & {task.prompt for task in held_out}


def test_the_tool_gives_the_answer_and_takes_whatever_the_model_writes() -> None:
    calculate = load_callable(f"{FOLDER / 'agent.py'}:calculate", "test")
    signs = set()
    for prompt, answer in load(1):
        question = re.fullmatch(r"(\d{3} ([-+*]) \d{3}) = \?", prompt)
        assert question is not None
        signs.add(question[2])
        assert calculate(f'{{"expression": "{question[1]}"}}') == answer
    assert signs == set("+-*")


@pytest.mark.parametrize(
    "arguments",
    [
        *("", "{", "[]", "3", "null", "{}", '{"expression": 3}', '{"expression": null}', '{"expression": "2 ** 9"}'),
        '{"expression": "__import__(\'os\')"}',
        f'{{"expression": "{"9" * 5000} * 2"}}',
    ],
)
def test_a_malformed_call_is_answered_not_raised(arguments: str) -> None:
    calculate = load_callable(f"{FOLDER / 'agent.py'}:calculate", "test")
    assert calculate(arguments).startswith("error")
