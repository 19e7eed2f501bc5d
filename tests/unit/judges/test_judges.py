"""Every kind of judge gives a finite reward, or a JudgeError that says which judge it was and what it got."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stenograph.config import JudgeConfig, TasksConfig
from stenograph.errors import ConfigError, JudgeError
from stenograph.judges import load_judge
from stenograph.tasks import load_tasks
from stenograph.types import Judgement, Outcome, Task

JUDGES = """
import asyncio, sys, time
import numpy as np
from stenograph.types import Judgement

def number(task, outcome): return np.float32(0.5)
def boolean(task, outcome): return outcome.answer == task.answer
def parts(task, outcome): return Judgement(0.75, {"form": 1})
def by_turn(task, outcome): return Judgement(1.0, turn_rewards=[1, np.float32(0.5), -0.1][:outcome.num_turns])
async def patient(task, outcome):
    await asyncio.sleep(0.01)
    return 0.25
def hangs(task, outcome): time.sleep(task.data["seconds"])
async def waits(task, outcome): await asyncio.sleep(60)
def raises(task, outcome): raise KeyError("nothing there")
def ends(task, outcome): next(iter([]))
def leaves(task, outcome): sys.exit(3)
def times_out(task, outcome): raise TimeoutError("of its own")
def garbage(task, outcome): return "well done"
def nothing(task, outcome): pass
def nan(task, outcome): return float("nan")
def huge(task, outcome): return 10 ** 400
def bad_reward(task, outcome): return Judgement("1")
def bad_part(task, outcome): return Judgement(1.0, {"form": "good"})
def bad_turn(task, outcome): return Judgement(1.0, turn_rewards=(0.5, float("nan")))
def no_turn(task, outcome): return Judgement(1.0, turn_rewards=(None,))
def turns_by_number(task, outcome): return Judgement(1.0, turn_rewards={0: 1.0})
def turns_as_text(task, outcome): return Judgement(1.0, turn_rewards="12")
not_a_function = 3
"""


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("judges") / "mine.py"
    path.write_text(JUDGES)
    return path


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("judge-"):
            thread.join(5)


def outcome(answer: str | None = "42", workdir: Path = Path("/")) -> Outcome:
    return Outcome(answer, 0, "", "", str(workdir), 0.1, num_turns=3)


TASK = Task("t", "6 * 7 = ?", "42")


async def reward(answer: str | None, task: Task = TASK, **config: Any) -> float:
    return (await load_judge(JudgeConfig.model_validate(config))(task, outcome(answer))).reward


async def test_exact_leaves_white_space_aside() -> None:
    assert [await reward(a, kind="exact") for a in (" 42\n", "42.0", "", None)] == [1.0, 0.0, 0.0, 0.0]


async def test_exact_needs_an_answer_to_compare_with() -> None:
    with pytest.raises(JudgeError, match="task t has no answer"):
        await reward("42", Task("t", "?"), kind="exact")


async def test_regex_compares_its_group() -> None:
    group = r"answer is (\d+)"
    answers = ("the answer is 42!", "the answer is 43", "42", None)
    assert [await reward(a, kind="regex", pattern=group) for a in answers] == [1.0, 0.0, 0.0, 0.0]
    assert await reward("say 42", kind="regex", pattern=r"\d+") == 1.0
    assert await reward("say 43", Task("t", "?"), kind="regex", pattern=r"\d+") == 1.0


def test_a_bad_pattern_stops_at_start_up() -> None:
    with pytest.raises(ConfigError, match=r"judge\.pattern: not a regular expression"):
        load_judge(JudgeConfig(kind="regex", pattern="("))


async def test_a_dataset_scores_its_own_tasks() -> None:
    pytest.importorskip("reasoning_gym")
    (task,) = load_tasks(TasksConfig(dataset="chain_sum", size=1))
    assert await reward(task.answer, task, kind="dataset") == 1.0
    assert await reward("nonsense", task, kind="dataset") == 0.0
    assert await reward(None, task, kind="dataset") == 0.0
    with pytest.raises(JudgeError, match=r"needs tasks\.dataset"):
        await reward("42", kind="dataset")


async def test_a_dataset_scores_by_the_settings_that_made_the_task() -> None:
    """This one allows an error of one unit in the last decimal place that its settings ask for."""
    pytest.importorskip("reasoning_gym")
    config = TasksConfig(
        dataset="decimal_arithmetic", params={"min_num_decimal_places": 1, "max_num_decimal_places": 1}, size=1
    )
    (coarse,), (fine,) = load_tasks(config), load_tasks(config.model_copy(update={"params": {}}))

    def near(task: Task) -> str:
        return str(float(task.answer or "") + 0.09)

    assert await reward(near(coarse), coarse, kind="dataset") == 1.0
    assert await reward(near(fine), fine, kind="dataset") == 0.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("number", Judgement(0.5)),
        ("boolean", Judgement(1.0)),
        ("parts", Judgement(0.75, {"form": 1.0})),
        ("by_turn", Judgement(1.0, {}, (1.0, 0.5, -0.1))),
        ("patient", Judgement(0.25)),
    ],
)
async def test_a_callable_judges(judges: Path, name: str, expected: Judgement) -> None:
    judge = load_judge(JudgeConfig(kind="callable", callable=f"{judges}:{name}"))
    assert await judge(TASK, outcome()) == expected


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("raises", "KeyError on task t: 'nothing there'"),
        ("ends", "StopIteration"),
        ("leaves", r"SystemExit\(3\)"),
        ("times_out", "TimeoutError on task t: of its own"),
        ("garbage", "answered 'well done'"),
        ("nothing", "answered None"),
        ("nan", "answered nan"),
        ("huge", "answered 1000"),
        ("bad_reward", r"answered Judgement\(reward='1'"),
        ("bad_part", "answered Judgement"),
        ("bad_turn", r"turn_rewards=\(0.5, nan\)"),
        ("no_turn", r"turn_rewards=\(None,\)"),
        ("turns_by_number", r"turn_rewards=\{0: 1.0\}"),
        ("turns_as_text", "turn_rewards='12'"),
    ],
)
async def test_what_is_no_reward_is_a_judge_error(judges: Path, name: str, told: str) -> None:
    judge = load_judge(JudgeConfig(kind="callable", callable=f"{judges}:{name}", timeout_s=5))
    with pytest.raises(JudgeError, match=told):
        await judge(TASK, outcome())


async def test_a_judge_that_takes_too_long_is_left_behind(judges: Path) -> None:
    for name in ("hangs", "waits"):
        judge = load_judge(JudgeConfig(kind="callable", callable=f"{judges}:{name}", timeout_s=0.1))
        with pytest.raises(JudgeError, match=f"{name} took longer than 0.1 s"):
            await judge(Task("t", "?", data={"seconds": 0.5}), outcome())


async def test_judges_that_hang_hold_up_neither_others_nor_the_loop(judges: Path) -> None:
    """More of them than any pool of threads has: a judge that waits for a thread would time out innocently."""
    slow = load_judge(JudgeConfig(kind="callable", callable=f"{judges}:hangs", timeout_s=0.2))
    quick = load_judge(JudgeConfig(kind="exact", timeout_s=5))
    began = time.monotonic()
    hanging = [asyncio.ensure_future(slow(Task("t", "?", data={"seconds": 1.0}), outcome())) for _ in range(40)]
    await asyncio.sleep(0)
    assert (await quick(TASK, outcome())).reward == 1.0
    results = await asyncio.gather(*hanging, return_exceptions=True)
    assert time.monotonic() - began < 1.0
    assert all(isinstance(result, JudgeError) for result in results)


@pytest.mark.parametrize(
    ("name", "told"),
    [("not_a_function", "is a int, not a function"), ("nan_", "has no function 'nan_'; close matches: nan")],
)
def test_a_callable_that_is_not_there_stops_at_start_up(judges: Path, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"judge\.callable: .*{told}"):
        load_judge(JudgeConfig(kind="callable", callable=f"{judges}:{name}"))


async def command(code: str, workdir: Path, task: Task = TASK, **config: Any) -> Judgement:
    settings = JudgeConfig(kind="command", command=(sys.executable, "-c", code), **config)
    return await load_judge(settings)(task, outcome(workdir=workdir))


async def test_a_command_reads_task_and_outcome_and_finds_what_the_agent_left(tmp_path: Path) -> None:
    (tmp_path / "left").write_text("3")
    (tmp_path / "json.py").write_text("raise SystemExit('an agent may not stand in for the judge')")
    code = "import json, sys; got = json.load(sys.stdin); print('looking'); assert len(got['task']['prompt']) == 9; "
    code += "left = int(open(got['outcome']['workdir'] + '/left').read()); "
    code += "print(json.dumps({'reward': float(got['outcome']['answer']), 'parts': {'left': left}}))"
    assert await command(code, tmp_path) == Judgement(42.0, {"left": 3.0})
    assert await command("print(0.5); print()", tmp_path) == Judgement(0.5)


async def test_a_command_may_score_each_turn(tmp_path: Path) -> None:
    code = "import json, sys; num_turns = json.load(sys.stdin)['outcome']['num_turns']; "
    code += "print(json.dumps({'reward': 1, 'turn_rewards': [n / 7 for n in range(num_turns)]}))"
    assert await command(code, tmp_path) == Judgement(1.0, {}, (0.0, 1 / 7, 2 / 7))
    nothing = 'print(\'{"reward": 1, "parts": null, "turn_rewards": null}\')'
    assert await command(nothing, tmp_path) == Judgement(1.0)


async def test_a_command_need_not_read(tmp_path: Path) -> None:
    assert await command("print(1)", tmp_path, Task("t", "?" * 3_000_000)) == Judgement(1.0)


async def test_a_talkative_command_is_heard_to_its_end(tmp_path: Path) -> None:
    assert await command("print('x' * 3_000_000); print(1)", tmp_path) == Judgement(1.0)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print('good')", r"got \['good'\]"),
        ("pass", r"got \[\]"),
        ("print('NaN')", "got"),
        ("print('{\"parts\": {}}')", "got"),
        ('print(\'{"reward": "1"}\')', "answered Judgement"),
        ('print(\'{"reward": 1, "parts": [1]}\')', "answered Judgement"),
        ('print(\'{"reward": 1, "turn_rewards": [1, "2"]}\')', "answered Judgement"),
        ('print(\'{"reward": 1, "turn_rewards": {"1": 2}}\')', "answered Judgement"),
        ('print(\'{"reward": 1, "turn_rewards": 2}\')', "answered Judgement"),
        ('print(\'{"reward": 1, "turn_rewards": [NaN]}\')', "got"),
        ("import sys; print(1); sys.exit('broken')", "exited with 1: broken"),
    ],
)
async def test_what_a_command_may_not_say(tmp_path: Path, code: str, told: str) -> None:
    with pytest.raises(JudgeError, match=told):
        await command(code, tmp_path)


async def test_a_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(JudgeError, match=r"took longer than 0\.5 s"):
        await command("import time; time.sleep(60)", tmp_path, timeout_s=0.5)
    assert time.monotonic() - began < 5


def test_a_command_that_is_not_there_stops_at_start_up() -> None:
    for missing in (("no-such-judge",), ()):
        with pytest.raises(ConfigError, match=r"judge\.command"):
            load_judge(JudgeConfig(kind="command", command=missing))


@pytest.mark.parametrize(
    "judge", [{"kind": "regex"}, {"kind": "exact", "unknown": 1}, {"kind": "regex", "pattern": "("}]
)
async def test_a_task_may_bring_its_judge(judge: Mapping[str, Any]) -> None:
    own = Task("t", "?", "42", judge={"kind": "regex", "pattern": r"\d+"})
    assert await reward("it is 42", own, kind="exact") == 1.0
    with pytest.raises(JudgeError, match="task t: its judge is not valid"):
        await reward("42", Task("t", "?", "42", judge=judge), kind="exact")
