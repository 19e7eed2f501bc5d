"""The judges that come with us: a task and an outcome in, 0 to 1 out, and no other state than their settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

import orjson

from stenograph.errors import ConfigError, JudgeError
from stenograph.types import Outcome, Task

Score = Callable[[Task, Outcome], float]


def exact(task: Task, outcome: Outcome) -> float:
    """1 where the answer is the task's, white space around it aside."""
    if task.answer is None:
        raise JudgeError(f"task {task.id} has no answer to compare with; give one, or choose another judge")
    return float(outcome.answer is not None and outcome.answer.strip() == task.answer.strip())


def regex(pattern: str) -> Score:
    """1 where group 1, else the whole match, is the task's answer; without one, where the pattern is found at all."""
    try:
        compiled = re.compile(pattern)
    except re.error as e:
        raise ConfigError(f"judge.pattern: not a regular expression: {e}") from e

    def score(task: Task, outcome: Outcome) -> float:
        match = compiled.search(outcome.answer or "")
        if match is None:
            return 0.0
        found = match.group(1) if compiled.groups else match.group()
        return float(task.answer is None or (found or "").strip() == task.answer.strip())

    return score


def dataset(task: Task, outcome: Outcome) -> float:
    """What the reasoning-gym dataset that made the task says of the answer."""
    if "_entry" not in task.data or "dataset" not in task.data:
        raise JudgeError(f'task {task.id} is of no dataset; judge.kind = "dataset" needs tasks.dataset')
    score = _scorer(task.data["dataset"], orjson.dumps(dict(task.data.get("params", {}))))
    return float(score(answer=outcome.answer, entry=task.data["_entry"]))


@lru_cache(maxsize=64)
def _scorer(name: str, params: bytes) -> Callable[..., float]:
    """Some datasets score by their settings, and some take seconds to make: one is made per name and settings."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **orjson.loads(params)).score_answer
