"""A run that is killed anywhere and resumed ends as one that was not: to the bit, and with nothing counted twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stenograph.rendering import builtin_tokenizer
from stenograph.rundir import open_journal
from support.killed import Run, Runner, runner
from support.models import tiny_model

AGENT = """
import aiohttp


async def agent(task, session):
    messages, said = [{"role": "user", "content": task.prompt}], ""
    headers = {"authorization": "Bearer " + session.api_key}
    async with aiohttp.ClientSession(headers=headers) as client:
        for _ in range(2):
            body = {"model": "m", "messages": messages, "max_tokens": 8}
            async with client.post(session.base_url + "/v1/chat/completions", json=body) as answer:
                message = (await answer.json())["choices"][0]["message"]
            said += message["content"] or ""
            messages += [message, {"role": "user", "content": "more"}]
    return str(len(said.encode()) % 3)


def judge(task, outcome):
    return float(outcome.answer)
"""

CONFIG = """
[model]
path = "{model}"
renderer = "qwen3"
thinking_retention = "all"
[engine]
weights = "copy"
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
num_groups = 2
group_size = 2
max_concurrent = 1
[algorithm]
estimator = "{estimator}"
[training]
steps = 3
lr = 1e-3
num_threads = 1
record = "all"
checkpoint_every = 2
[evaluation]
every = 2
num_samples = 1
max_tasks = 1
[evaluation.tasks]
path = "tasks.jsonl"
"""
# Where a run announces what begins: every phase of every step, and every row once it is written.
BOUNDARIES = [
    *((phase, n) for phase in ("rollouts", "recording", "training", "publishing") for n in (1, 2, 3)),
    *(("saving", n) for n in (1, 2)),
    *(("evaluation", n) for n in (1, 2, 3)),
    *(("row", n) for n in (1, 2, 3, 4, 5, 6)),
    ("done", 1),
]


@dataclass(frozen=True, slots=True)
class Project:
    """A folder with a configuration, and an uninterrupted run of it."""

    folder: Path
    runner: Runner
    whole: Path

    @property
    def config(self) -> str:
        return str(self.folder / "config.toml")


@pytest.fixture(scope="module", params=["gae", pytest.param("grpo", marks=pytest.mark.slow)])
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model(len(builtin_tokenizer()), context_length=1024).save_pretrained(folder / "model")
    builtin_tokenizer().save_pretrained(folder / "model")
    (folder / "agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text("".join(f'{{"id": "t{n}", "prompt": "say {n}"}}\n' for n in range(4)))
    (folder / "config.toml").write_text(CONFIG.format(model=folder / "model", estimator=request.param))
    with runner(folder) as runs:
        whole = folder / "whole"
        assert runs.run(Run(str(whole), str(folder / "config.toml"))) == 0, (folder / "said").read_text()
        yield Project(folder, runs, whole)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def told(run: Path, *, without: str = "") -> dict[str, Any]:
    """What a run left, less what no two runs have in common: names and times."""
    clocks = {"time_s", "seconds", "training_seconds"}
    metrics = [{name: row[name] for name in row.keys() - clocks} for row in rows(run / "metrics.jsonl")]
    summary = json.loads((run / "summary.json").read_text())
    rollouts = [row for row in rows(run / "rollouts.jsonl") if row["status"] != without]
    names = ("step", "group_id", "task_id", "reward", "status", "num_turns", "ledger")
    return {
        "metrics": metrics,
        "summary": {name: summary[name] for name in summary.keys() - clocks - {"ledger"}},
        "rollouts": [{name: row[name] for name in names} for row in rollouts],
    }


def tokens(run: Path) -> list[dict[str, list[Any]]]:
    """What every branch was sampled as and trained with, in the order of training."""
    found = []
    with open_journal(run) as journal:
        for row in rows(run / "rollouts.jsonl"):
            if row["status"] == "interrupted":
                continue
            for sample in journal.load(row["session"]).samples():
                arrays = np.load(run / "tokens" / f"step-{row['step']:06d}.npz")
                names = ("ids", "rollout_logprobs", "versions", "loss_mask")
                here = {name: getattr(sample, name).tolist() for name in names}
                for name in ("old_logprobs", "advantages"):
                    here[name] = arrays[f"{sample.session}/{sample.branch}/{name}"].tolist()
                found.append(here)
    return found


def weights(run: Path) -> dict[str, torch.Tensor]:
    (last,) = sorted(run.glob("checkpoints/step-*/actor"))[-1:]
    return load_file(last / "model.safetensors")


def check_equal(run: Path, whole: Path) -> None:
    assert told(run, without="interrupted") == told(whole)
    assert tokens(run) == tokens(whole)
    ours, theirs = weights(run), weights(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def check_accounts(run: Path, whole: Path) -> None:
    """What was sampled besides is dropped as interrupted."""
    check_books(run)
    ledger = json.loads((run / "summary.json").read_text())["ledger"]
    of_whole = json.loads((whole / "summary.json").read_text())["ledger"]
    interrupted = ledger["dropped"].pop("interrupted", 0)
    assert ledger | {"sampled": ledger["sampled"] - interrupted} == of_whole


def check_books(run: Path) -> None:
    """Every token that was sampled is in the run's ledger once, as its session has it, and no session is left."""
    ledger = json.loads((run / "summary.json").read_text())["ledger"]
    written = rows(run / "rollouts.jsonl")
    with open_journal(run) as journal:
        records = [journal.load(session) for session in journal.sessions()]
    assert sorted(row["session"] for row in written) == sorted(record.id for record in records)
    assert all(record.released and record.ledger().in_flight == 0 for record in records)
    assert sum(record.ledger().sampled for record in records) == ledger["sampled"]
    assert not list((run / "checkpoints").glob(".*"))


# From two batches and no checkpoint; from a checkpoint and no batch, where a forgotten publish would show.
@pytest.mark.parametrize(("phase", "times"), [("publishing", 2), ("recording", 3)])
def test_a_run_that_is_killed_and_resumed_is_the_uninterrupted_one_to_the_bit(
    project: Project, phase: str, times: int
) -> None:
    interrupt(project, phase, times)


@pytest.mark.slow
def test_a_crash_amid_the_rows_of_a_step_counts_each_rollout_once(project: Project) -> None:
    run = project.folder / "amid"
    assert project.runner.run(Run(str(run), project.config, "row", 3)) == -9  # of the first evaluation and two steps
    for name, num_lines in (("rollouts.jsonl", 6), ("metrics.jsonl", 2)):
        lines = (run / name).read_bytes().splitlines(keepends=True)
        (run / name).write_bytes(b"".join(lines[:num_lines]) + lines[num_lines][:20])
    assert project.runner.run(Run(str(run), None)) == 0, (project.folder / "said").read_text()
    check_equal(run, project.whole)
    check_accounts(run, project.whole)


@pytest.mark.slow
def test_rollouts_that_ran_ahead_of_the_trainer_are_accounted_for(project: Project) -> None:
    run, config = project.folder / "ahead", project.folder / "ahead.toml"
    ahead = "max_concurrent = 2\nmax_staleness = 1"
    config.write_text(Path(project.config).read_text().replace("max_concurrent = 1", ahead))
    assert project.runner.run(Run(str(run), str(config), "publishing", 2)) == -9
    assert project.runner.run(Run(str(run), None)) == 0, (project.folder / "said").read_text()
    check_books(run)
    assert [row["step"] for row in rows(run / "metrics.jsonl") if "reward_mean" in row] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "times"), BOUNDARIES, ids=lambda value: str(value))
def test_wherever_it_is_killed(project: Project, phase: str, times: int) -> None:
    interrupt(project, phase, times)


def interrupt(project: Project, phase: str, times: int) -> None:
    run = project.folder / f"{phase}-{times}"
    if not run.exists():
        assert project.runner.run(Run(str(run), project.config, phase, times)) == -9
        assert project.runner.run(Run(str(run), None)) == 0, (project.folder / "said").read_text()
    check_equal(run, project.whole)
    check_accounts(run, project.whole)
