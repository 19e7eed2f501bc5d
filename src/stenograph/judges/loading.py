"""A judge turns an outcome into a finite reward, or raises a JudgeError that names it and what it answered."""

from __future__ import annotations

import asyncio
import inspect
import math
import tempfile
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from numbers import Real
from typing import Any

import orjson
from pydantic import ValidationError

from stenograph.config import JudgeConfig
from stenograph.errors import ConfigError, JudgeError, boundary
from stenograph.imports import TookTooLong, finish, load_callable
from stenograph.judges import scores
from stenograph.processes import resolve_command, run_process
from stenograph.types import Judgement, Outcome, Task

Judge = Callable[[Task, Outcome], Awaitable[Judgement]]
MAX_OUTPUT_BYTES = 1_000_000  # of a judge command's stdout and of its stderr, each


def load_judge(config: JudgeConfig) -> Judge:
    """The run's judge. A task's own `judge` (fields of JudgeConfig) takes its place for that task.

    Raises ConfigError where the run's judge cannot be had.
    """
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
            return _from_function(scores.exact, "exact", config.timeout_s)
        case "regex":
            return _from_function(scores.regex(config.pattern or ""), "regex", config.timeout_s)
        case "dataset":
            return _from_function(scores.dataset, "dataset", config.timeout_s)
        case "callable":
            name = config.callable or ""
            return _from_function(load_callable(name, "judge.callable"), name, config.timeout_s)
        case "command":
            return _from_command(config)


def _from_function(function: Callable[[Task, Outcome], Any], name: str, timeout_s: float) -> Judge:
    """One that is not async gets a thread, so that it cannot hold up the others."""

    async def judge(task: Task, outcome: Outcome) -> Judgement:
        try:
            answer = await finish(_answer(function, task, outcome), timeout_s)
        except JudgeError:
            raise
        except TookTooLong as e:
            raise _too_long(name, timeout_s) from e
        except Exception as e:
            raise JudgeError(f"judge {name} raised {type(e).__name__} on task {task.id}: {e}") from e
        return _checked(answer, name)

    return judge


async def _answer(function: Callable[[Task, Outcome], Any], task: Task, outcome: Outcome) -> Any:
    is_async = inspect.iscoroutinefunction(function)
    answer = function(task, outcome) if is_async else await _in_thread(function, task, outcome)
    return await answer if inspect.isawaitable(answer) else answer


async def _in_thread(function: Callable[[Task, Outcome], Any], task: Task, outcome: Outcome) -> Any:
    """Call in a daemon thread of its own: one that hangs holds up neither other judges nor the end of the run."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(answer: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((answer, error))

    def call() -> None:
        answer, error = None, None
        try:
            answer = function(task, outcome)
        except BaseException as e:  # SystemExit too: it must not pass for a judge that hangs
            error = e
        with suppress(RuntimeError):  # the loop has closed meanwhile: nobody waits any more
            loop.call_soon_threadsafe(settle, answer, error)

    threading.Thread(target=call, name=f"judge-{task.id}", daemon=True).start()
    answer, error = await done
    if isinstance(error, Exception):
        raise error
    if error is not None:
        raise JudgeError(f"the judge of task {task.id} raised {error!r}; raise an Exception, or return a reward")
    return answer


def _from_command(config: JudgeConfig) -> Judge:
    command = resolve_command(config.command or (), "judge.command")
    name = " ".join(command)

    async def judge(task: Task, outcome: Outcome) -> Judgement:
        with boundary(JudgeError, f"run judge {name} on task {task.id}"):
            payload = {"task": asdict(task), "outcome": asdict(outcome)}
            # A folder of its own: in the agent's, files that the agent left could stand in for the judge's modules.
            with tempfile.TemporaryDirectory(prefix="steno-judge-") as folder:
                done = await run_process(
                    command,
                    cwd=folder,
                    stdin=orjson.dumps(payload, default=str, option=orjson.OPT_NON_STR_KEYS),
                    timeout_s=config.timeout_s,
                    max_output_bytes=MAX_OUTPUT_BYTES,
                )
        if done.exit_code is None:
            raise _too_long(name, config.timeout_s)
        if done.exit_code != 0:
            raise JudgeError(f"judge {name} exited with {done.exit_code}: {done.stderr[-300:].strip()}")
        return _last_line(done.stdout, name)

    return judge


def _last_line(stdout: str, name: str) -> Judgement:
    lines = [line for line in stdout.split("\n") if line.strip()]  # JSON may hold U+2028, where str.splitlines cuts
    try:
        answer = orjson.loads(lines[-1])
        if isinstance(answer, dict):
            answer = Judgement(answer["reward"], answer.get("parts") or {}, answer.get("turn_rewards") or ())
    except (IndexError, ValueError, KeyError) as e:
        told = f"judge {name}: the last line of its stdout must be a number or"
        raise JudgeError(f'{told} {{"reward": x}}, got {lines[-1:]!r:.300}') from e
    return _checked(answer, name)


def _checked(answer: Any, name: str) -> Judgement:
    judgement = Judgement(answer) if isinstance(answer, Real) else answer  # type: ignore[arg-type]
    with suppress(TypeError, ValueError, OverflowError, AttributeError):
        if isinstance(judgement, Judgement):
            parts = {name: _finite(value) for name, value in judgement.parts.items()}
            return Judgement(_finite(judgement.reward), parts, _finite_each(judgement.turn_rewards))
    told = "return a finite number, or a Judgement of finite numbers"
    raise JudgeError(f"judge {name} answered {answer!r:.300}; {told}")


def _finite(value: Any) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


def _finite_each(values: Any) -> tuple[float, ...]:
    if not isinstance(values, tuple | list):  # a mapping's keys or a set's members would pass for rewards in order
        raise TypeError(f"{values!r} is no list of numbers")
    return tuple(_finite(value) for value in values)


def _too_long(name: str, timeout_s: float) -> JudgeError:
    return JudgeError(f"judge {name} took longer than {timeout_s:g} s; make it faster or raise judge.timeout_s")
