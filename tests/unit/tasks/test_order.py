"""The order of tasks depends on the step alone."""

from __future__ import annotations

from collections import Counter

from stenograph.tasks import tasks_for_step
from stenograph.types import Task

TASKS = [Task(str(n), "p") for n in range(10)]


def ids(steps: range, seed: int = 1, shuffle: bool = True, num_groups: int = 4) -> list[str]:
    chosen = [tasks_for_step(TASKS, step, num_groups, seed=seed, shuffle=shuffle) for step in steps]
    assert all(len(tasks) == num_groups for tasks in chosen)
    return [task.id for tasks in chosen for task in tasks]


def test_every_pass_takes_every_task_once_in_an_order_of_its_own() -> None:
    order = ids(range(10))
    passes = [order[n : n + 10] for n in range(0, 40, 10)]
    assert all(Counter(taken) == Counter(task.id for task in TASKS) for taken in passes)
    assert len({tuple(taken) for taken in passes}) == 4


def test_a_resumed_run_goes_on_where_it_was() -> None:
    assert ids(range(10))[12:] == ids(range(3, 10))


def test_another_seed_is_another_order() -> None:
    assert ids(range(5), seed=1) != ids(range(5), seed=2)


def test_without_shuffling_tasks_come_in_turn() -> None:
    assert ids(range(3), shuffle=False) == list("012345678901")


def test_a_step_may_take_more_than_there_are() -> None:
    assert Counter(ids(range(1), num_groups=25)).most_common(1)[0][1] == 3
