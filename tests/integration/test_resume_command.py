"""`steno train --resume` and `--init-from`: what goes on, what is refused in one line, and what is told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stenograph.errors import ConfigError
from stenograph.rendering import builtin_tokenizer
from stenograph.rundir import JOURNAL, RunDir, open_journal
from support.killed import Done, Run, Runner, runner
from support.models import tiny_model

AGENT = """
import asyncio
import pathlib

import aiohttp


async def agent(task, session):
    while pathlib.Path(__file__).with_name("wait").exists():
        await asyncio.sleep(0.05)
    body = {"model": "m", "messages": [{"role": "user", "content": task.prompt}], "max_tokens": 8}
    headers = {"authorization": "Bearer " + session.api_key}
    async with aiohttp.ClientSession(headers=headers) as client:
        async with client.post(session.base_url + "/v1/chat/completions", json=body) as answer:
            return (await answer.json())["choices"][0]["message"]["content"]


def judge(task, outcome):
    return float(len(outcome.answer.encode()) % 3)
"""

CONFIG = """
[model]
path = "{model}"
renderer = "qwen3"
[engine]
num_blocks = 64
[gateway]
port = 0
[sampling]
force = {{ temperature = 1.0 }}
[tasks]
path = "tasks.jsonl"
[agent]
callable = "agent.py:agent"
[judge]
kind = "callable"
callable = "agent.py:judge"
[rollouts]
num_groups = 1
group_size = 4
max_concurrent = 1
[training]
steps = 2
lr = 1e-3
num_threads = 1
checkpoint_every = 1
"""


@dataclass(frozen=True, slots=True)
class Project:
    folder: Path
    runner: Runner

    def steno(self, *argv: str) -> Done:
        return self.runner.steno(*argv)

    def train(self, run: str, *argv: str) -> Done:
        return self.steno("train", str(self.folder / "config.toml"), "--run-dir", str(self.folder / run), *argv)

    def copy(self, run: str) -> Path:
        """Another run, as the one that is done."""
        return Path(shutil.copytree(self.folder / "done", self.folder / run))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A folder with a configuration, and a run of it that is done."""
    folder = tmp_path_factory.mktemp("project")
    tiny_model(len(builtin_tokenizer()), context_length=1024).save_pretrained(folder / "model")
    builtin_tokenizer().save_pretrained(folder / "model")
    (folder / "agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text('{"id": "t", "prompt": "say 1"}\n')
    (folder / "config.toml").write_text(CONFIG.format(model=folder / "model"))
    with runner(folder) as runs:
        project = Project(folder, runs)
        done = project.train("done")
        assert done.code == 0, done.error
        yield project


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def refused(done: Done, *told: str) -> None:
    assert (done.code, done.out) == (2, "")
    assert done.error.startswith("steno: ")
    assert done.error.count("\n") == 1
    for part in told:
        assert part in done.error


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "actor" / "model.safetensors")


def test_a_run_that_is_done_says_so_and_goes_on_where_more_is_asked(project: Project) -> None:
    run = project.copy("more")
    done = project.steno("train", "--resume", str(run))
    assert (done.code, done.error.count("\n")) == (0, 1)
    assert "has done 2 steps, and 2 are asked for" in done.error
    assert json.loads(done.out)["status"] == "completed"
    before = rows(run / "metrics.jsonl")

    done = project.steno("train", "--resume", str(run), "--set", "training.steps=3")
    assert done.code == 0, done.error
    summary = json.loads(done.out)
    assert (summary["status"], summary["steps"]) == ("completed", 3)
    after = rows(run / "metrics.jsonl")
    assert after[:2] == before
    assert [row["step"] for row in after] == [1, 2, 3]
    assert after[2]["time_s"] > before[-1]["time_s"]
    assert summary["ledger"]["sampled"] == sum(row["ledger"]["sampled"] for row in rows(run / "rollouts.jsonl"))
    assert {path.name for path in (run / "checkpoints").glob("step-*")} == {"step-000002", "step-000003"}
    assert "steps = 3" in (run / "config.toml").read_text()
    assert project.steno("train", "--resume", str(run)).code == 0  # and knows now that it is done


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_between_steps_can_be_resumed(project: Project, name: signal.Signals) -> None:
    """Whatever its agents were at is in the ledger, and nothing of it is left."""
    run = project.folder / f"interrupted-{name}"
    wait = project.folder / "wait"
    wait.touch()
    try:
        process = project.runner.start("train", str(project.folder / "config.toml"), "--run-dir", str(run))
        deadline = time.monotonic() + 60
        while not num_sessions(run) and time.monotonic() < deadline:
            time.sleep(0.1)
        with pytest.raises(ConfigError, match="still running"), RunDir(run).locked():
            pass
        os.kill(process, name)
        assert project.runner.end().code == 130
    finally:
        wait.unlink()
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    done = project.steno("train", "--resume", str(run))
    assert done.code == 0, done.error
    whole = project.folder / "done"
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == [1, 2]
    ours, theirs = (weights(one / "checkpoints" / "step-000002") for one in (run, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with open_journal(run) as journal:
        records = [journal.load(session) for session in journal.sessions()]
    assert all(record.released and record.ledger().in_flight == 0 for record in records)


def num_sessions(run: Path) -> int:
    if not (run / JOURNAL).exists():
        return 0
    with open_journal(run) as journal:
        return len(journal.sessions())


def test_a_run_that_another_process_is_at_work_on_is_refused(project: Project) -> None:
    run = project.copy("busy")
    with RunDir(run).locked():
        refused(project.steno("train", "--resume", str(run), "--set", "training.steps=3"), f"{run} is still running")


def test_rows_that_a_crash_cut_short_are_dropped(project: Project) -> None:
    run = project.copy("torn")
    whole = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "rollouts.jsonl", "spans.jsonl")}
    for name in whole:
        with (run / name).open("ab") as file:
            file.write(b'{"step": 3, "rew')
    done = project.steno("train", "--resume", str(run), "--set", "training.steps=3")
    assert done.code == 0, done.error
    for name, before in whole.items():
        assert (run / name).read_bytes().startswith(before)
        assert all(isinstance(row, dict) for row in rows(run / name))
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == [1, 2, 3]


def test_the_newest_checkpoint_where_it_is_damaged_gives_way_to_the_one_before(project: Project) -> None:
    run = project.copy("damaged")
    newest = run / "checkpoints" / "step-000002"
    before = weights(newest)
    (newest / "state" / "actor.pt").unlink()
    done = project.steno("train", "--resume", str(run), "--set", "training.steps=3")
    assert (done.code, done.error.count("\n")) == (1, 1)
    assert "step-000002/state/actor.pt is damaged" in done.error
    assert "remove its checkpoint, and take the one before" in done.error
    shutil.rmtree(newest)
    more = ("--set", "training.steps=3", "--set", "training.keep_checkpoints=9")
    done = project.steno("train", "--resume", str(run), *more)
    assert done.code == 0, done.error
    again = weights(newest)
    assert all(torch.equal(before[name], again[name]) for name in before)
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == [1, 2, 3]


def test_fewer_steps_than_were_rolled_out_end_with_a_checkpoint_too(project: Project) -> None:
    run = project.copy("fewer")
    (run / "summary.json").unlink()
    last = run / "checkpoints" / "step-000002"
    before = weights(last)
    shutil.rmtree(last)  # its batch is left
    done = project.steno(
        "train", "--resume", str(run), "--set", "training.steps=1", "--set", "training.checkpoint_every=9"
    )
    assert done.code == 0, done.error
    assert json.loads(done.out)["steps"] == 2
    after = weights(last)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_from_before_a_field_is_told_of_in_one_line(project: Project) -> None:
    run = project.copy("early")
    loop = run / "checkpoints" / "step-000002" / "state" / "loop.json"
    held = json.loads(loop.read_text())
    del held["engine"]
    loop.write_text(json.dumps(held))
    done = project.steno("train", "--resume", str(run), "--set", "training.steps=3")
    assert done.code == 0, done.error
    told = f"steno: warning: {loop} was written before it had engine; going on with ''"
    assert [line for line in done.error.splitlines() if "warning" in line] == [told]


def test_a_record_that_nothing_leads_to_is_refused(project: Project) -> None:
    run = project.copy("lost")
    shutil.rmtree(run / "checkpoints" / "step-000002")
    shutil.rmtree(run / "checkpoints" / "batch-000002")
    done = project.steno("train", "--resume", str(run), "--set", "training.steps=3")
    refused(done, "is recorded up to step 2", "lead to step 1 alone", f"--init-from {run}")


REFUSED = [
    (("model.path=/nowhere",), "another model"),
    (("tasks.seed=7",), "another tasks"),
    (("rollouts.num_groups=2",), "another rollouts.num_groups"),
    (("algorithm.estimator=gae",), "another algorithm.has_critic"),
    (("store.kind=memory",), "another store"),
    (("training.stpes=3",), "training.stpes"),
]


@pytest.mark.parametrize(("settings", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_what_would_make_the_state_meaningless_is_refused(
    project: Project, settings: tuple[str, ...], told: str
) -> None:
    before = (project.folder / "done" / "config.toml").read_bytes()
    words = [word for setting in settings for word in ("--set", setting)]
    refused(project.steno("train", "--resume", str(project.folder / "done"), *words), told)
    assert (project.folder / "done" / "config.toml").read_bytes() == before


def test_what_holds_nothing_to_go_on_from_is_refused(project: Project) -> None:
    refused(project.steno("train", "--resume", str(project.folder)), "not the folder of a run of steno train")
    refused(project.steno("train", "--resume", "/nowhere/run"), "/nowhere/run is not the folder of a run")
    refused(
        project.steno("train", str(project.folder / "config.toml"), "--resume", str(project.folder)), "give it alone"
    )
    refused(project.steno("train"), "--resume RUN")
    refused(project.steno("train", str(project.folder / "config.toml"), "--load", "weights"), "--init-from")
    for setting in ("training.checkpoint_every=0", "store.kind=memory"):
        run = project.copy(setting)
        table, _, value = setting.partition("=")
        section, name = table.split(".")
        text = (run / "config.toml").read_text()
        old = next(line for line in text.split(f"[{section}]")[1].splitlines() if line.startswith(name))
        (run / "config.toml").write_text(
            text.replace(old, f"{name} = {json.dumps(value) if name == 'kind' else value}")
        )
        refused(project.steno("train", "--resume", str(run)), "begin a new run")


def test_a_new_run_begins_with_a_part_of_another(project: Project) -> None:
    done = project.train("begun", "--init-from", str(project.folder / "done"), "--set", "training.keep_checkpoints=9")
    assert done.code == 0, done.error
    run, origin = project.folder / "begun", project.folder / "done" / "checkpoints" / "step-000002"
    first = weights(run / "checkpoints" / "step-000000")
    assert all(torch.equal(first[name], weight) for name, weight in weights(origin).items())
    assert json.loads((run / "checkpoints/step-000000/state/loop.json").read_text())["step"] == 0
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == [1, 2]
    refused(project.train("never", "--init-from", "/nowhere"), "/nowhere is neither a checkpoint nor a run")
    refused(project.train("never", "--init-from", str(origin), "--load", "momentum"), "--load momentum")
    assert not (project.folder / "never").exists()


def test_a_run_that_is_killed_before_its_beginning_is_saved_never_goes_on_from_another(project: Project) -> None:
    run = project.folder / "never-begun"
    begun = Run(str(run), str(project.folder / "config.toml"), "saving", origin=str(project.folder / "done"))
    assert project.runner.run(begun) == -signal.SIGKILL
    assert not (run / "checkpoints" / "step-000000").exists()
    refused(project.steno("train", "--resume", str(run)), "not the folder of a run of steno train")


def test_a_device_that_is_given_to_one_model_at_a_time_changes_nothing(project: Project) -> None:
    done = project.train("offloaded", "--set", "training.offload=true")
    assert done.code == 0, done.error
    ours, theirs = (weights(project.folder / run / "checkpoints" / "step-000002") for run in ("offloaded", "done"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
