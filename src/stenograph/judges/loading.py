"""A judge turns an outcome into a finite reward, or raises a JudgeError that names it and what it answered."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import orjson
from pydantic import ValidationError

from stenograph.config import JudgeConfig
from stenograph.errors import ConfigError, JudgeError, boundary
from stenograph.imports import load_callable
from stenograph.processes import run_process
from stenograph.types import Judgement, Outcome, Task

Judge = Callable[[Task, Outcome], Awaitable[Judgement]]


def load_judge(config: JudgeConfig) -> Judge:
    """The run's judge. A task's own `judge` (fields of JudgeConfig) takes its place for that task."""
    default = _make(config)

    async def judge(task: Task, outcome: Outcome) -> Judgement:
        return await (default if task.judge is None else _own(task))(task, outcome)

    return judge


def _own(task: Task) -> Judge:
    try:
        return _make(JudgeConfig.model_validate(task.judge))
    except (ValidationError, ConfigError) as e:
        raise JudgeError(f"task {task.id}: its judge is not valid: {e}") from e


def _make(config: JudgeConfig) -> Judge:
    match config.kind:
        case "exact":
            return _by(_exact, "exact", config.timeout_s)
        case "regex":
            return _by(_regex(config.pattern or ""), "regex", config.timeout_s)
        case "dataset":
            return _by(_dataset, "dataset", config.timeout_s)
        case "callable":
            name = config.callable or ""
            return _by(load_callable(name, "judge.callable"), name, config.timeout_s)
        case "command":
            return _command(config)


def _by(function: Callable[[Task, Outcome], Any], name: str, timeout_s: float) -> Judge:
    """A judge from a function; one that is not async gets a thread, so that it cannot hold up the others."""

    async def judge(task: Task, outcome: Outcome) -> Judgement:
        with boundary(JudgeError, f"judge task {task.id} with {name}"):
            async with asyncio.timeout(timeout_s):
                answer = await asyncio.to_thread(function, task, outcome)
                if inspect.isawaitable(answer):
                    answer = await answer
        return _judgement(answer, name)

    return judge


def _judgement(answer: Any, name: str) -> Judgement:
    judgement = answer if isinstance(answer, Judgement) else None
    if isinstance(answer, int | float):
        judgement = Judgement(float(answer))
    if judgement is None or not math.isfinite(judgement.reward):
        raise JudgeError(f"judge {name} answered {answer!r}; return a finite number or a Judgement")
    return judgement


def _exact(task: Task, outcome: Outcome) -> float:
    return float(outcome.answer is not None and outcome.answer.strip() == _expected(task))


def _regex(pattern: str) -> Callable[[Task, Outcome], float]:
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


def _expected(task: Task) -> str:
    if task.answer is None:
        raise JudgeError(f"task {task.id} has no answer to compare with; give one, or choose another judge")
    return task.answer.strip()


def _dataset(task: Task, outcome: Outcome) -> float:
    import reasoning_gym

    if "entry" not in task.data:
        raise JudgeError(f'task {task.id} is of no dataset; judge.kind = "dataset" needs tasks.dataset')
    score: Callable[..., float] = reasoning_gym.get_score_answer_fn(task.data["dataset"])
    return float(score(answer=outcome.answer, entry=task.data["entry"]))


def _command(config: JudgeConfig) -> Judge:
    command = config.command or ()
    name = command[0] if command else "command"

    async def judge(task: Task, outcome: Outcome) -> Judgement:
        payload = orjson.dumps({"task": asdict(task), "outcome": asdict(outcome)}, default=str)
        with boundary(JudgeError, f"run judge {name}"):
            done = await run_process(
                command, cwd=outcome.workdir, stdin=payload, timeout_s=config.timeout_s, max_output_bytes=1_000_000
            )
        if done.exit_code is None:
            raise JudgeError(f"judge {name} took longer than {config.timeout_s:g} s; raise judge.timeout_s")
        if done.exit_code != 0:
            raise JudgeError(f"judge {name} exited with {done.exit_code}: {done.stderr[-300:].strip()}")
        return _read(done.stdout, name)

    return judge


def _read(stdout: str, name: str) -> Judgement:
    lines = [line for line in stdout.splitlines() if line.strip()]
    try:
        answer = orjson.loads(lines[-1])
        if isinstance(answer, dict):
            answer = Judgement(float(answer["reward"]), dict(answer.get("parts") or {}))
    except (IndexError, ValueError, KeyError, TypeError) as e:
        told = f"judge {name}: the last line of its stdout must be a number or"
        raise JudgeError(f'{told} {{"reward": x}}, got {lines[-1:]!r}') from e
    return _judgement(answer, name)
