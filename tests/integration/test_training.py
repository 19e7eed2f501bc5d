"""Whole runs on a tiny model: real agents over a real gateway, real steps, and what is left in the run's folder."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from stenograph.rendering import builtin_tokenizer
from stenograph.training.critic import critic_from_actor
from stenograph.training.weights import save_model
from support.models import tiny_model

STENO = str(Path(sys.executable).parent / "steno")

AGENT = """
import json, os, sys, urllib.request
def ask(messages):
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 12, "seed": 1}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    messages += [ask(messages), {"role": "user", "content": "more"}]
print(len(messages[1]["content"]) % 3)
"""

CONFIG = """
[model]
path = "{model}"
renderer = "qwen3"
thinking_retention = "all"
[engine]
num_blocks = 64
[gateway]
port = 0
[sampling]
force = {{ temperature = 1.0 }}
[tasks]
path = "tasks.jsonl"
[agent]
command = ["python", "agent.py", "{{prompt}}"]
timeout_s = 60
[judge]
kind = "callable"
callable = "judge.py:judge"
[rollouts]
num_groups = 2
group_size = 3
[training]
steps = 2
lr = 1e-3
num_threads = 1
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder as a user has it: a model, an agent, tasks, a judge, a config."""
    tiny_model(len(builtin_tokenizer()), context_length=1024).save_pretrained(tmp_path / "model")
    builtin_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "judge.py").write_text("def judge(task, outcome):\n    return float(outcome.answer)\n")
    tasks = [{"id": f"t{n}", "prompt": f"say {n}"} for n in range(4)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (tmp_path / "config.toml").write_text(CONFIG.format(model=tmp_path / "model"))
    return tmp_path


def train(project: Path, *settings: str, run: str = "run") -> subprocess.CompletedProcess[str]:
    command = [STENO, "train", str(project / "config.toml"), "--run-dir", str(project / run)]
    command += [word for setting in settings for word in ("--set", setting)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_run_leaves_a_whole_record(project: Path) -> None:
    done = train(project, "evaluation.every=2", f"evaluation.tasks.path={project / 'tasks.jsonl'}")
    assert done.returncode == 0, done.stderr
    run = project / "run"
    told = json.loads(done.stdout)
    summary = json.loads((run / "summary.json").read_text())
    assert told["run"] == str(run)
    assert (summary["status"], summary["steps"], summary["error"]) == ("completed", 2, None)

    steps = [row for row in rows(run / "metrics.jsonl") if "reward_mean" in row]
    assert [row["notes"]["ignored:seed"] for row in steps] == [12, 12]  # two turns of six rollouts
    evaluations = [row for row in rows(run / "metrics.jsonl") if "eval_reward_mean" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert [row["step"] for row in evaluations] == [0, 2]
    assert all(row["num_rollouts"] == 6 and row["engine_dtype"] == "float32" for row in steps)
    trained = [row for row in steps if row["applied"]]
    assert trained
    assert all(row["logprob_difference_p99"] < 1e-3 for row in trained)

    rollouts = rows(run / "rollouts.jsonl")
    assert len(rollouts) == 12
    assert {row["status"] for row in rollouts} == {"completed"}
    ledger = summary["ledger"]
    assert ledger["sampled"] == sum(row["ledger"]["sampled"] for row in rollouts) > 0
    assert ledger["in_flight"] == 0
    assert ledger["trained"] + sum(ledger["masked"].values()) + sum(ledger["dropped"].values()) == ledger["sampled"]

    samples = exported(run)
    assert sum(sum(row["loss_mask"]) for row in samples) == ledger["sampled"]
    assert {version for row in samples for version in row["versions"]} == {-1, 0, *range(summary["policy_version"])}
    arrays = np.load(run / "tokens" / "step-000001.npz")
    first = samples[0]
    mask = arrays[f"{first['session']}/{first['branch']}/loss_mask"]
    assert mask.tolist() == [bool(x) for x in first["loss_mask"]]
    spans = rows(run / "spans.jsonl")
    assert [span["name"] for span in spans] == [
        *("evaluation", "rollouts", "recording", "training", "publishing"),
        *("rollouts", "recording", "training", "publishing", "saving", "evaluation"),
    ]
    assert all(span["start_time_unix_nano"] <= span["end_time_unix_nano"] for span in spans)
    assert list((run / "tb").glob("events.out.tfevents.*"))
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    before = load_file(project / "model" / "model.safetensors")
    actor = run / "checkpoints" / "step-000002" / "actor"
    after = load_file(actor / "model.safetensors")
    assert AutoTokenizer.from_pretrained(actor).get_vocab() == builtin_tokenizer().get_vocab()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_one_request_at_a_time_repeats_to_the_bit(project: Path) -> None:
    for run in ("a", "b"):
        assert train(project, "rollouts.max_concurrent=1", run=run).returncode == 0
    a, b = (load_file(project / run / "checkpoints/step-000002/actor/model.safetensors") for run in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_sessions_are_released_after_their_step(project: Path) -> None:
    """The agents of the second step find that the keys of the first open nothing any more."""
    asking = """
import pathlib, urllib.error
seen = pathlib.Path(__file__).with_name("seen")
seen.mkdir(exist_ok=True)
earlier = sorted(path.read_text() for path in seen.iterdir())
(seen / os.environ["OPENAI_API_KEY"]).write_text(os.environ["OPENAI_API_KEY"])
refused = 0
for key in earlier:
    headers = {"authorization": "Bearer " + key}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/models", None, headers)
    try:
        urllib.request.urlopen(request).close()
    except urllib.error.HTTPError as e:
        refused += e.code == 401
        e.close()
print(refused)
"""
    (project / "agent.py").write_text(AGENT + asking)
    done = train(project, "rollouts.max_concurrent=1")
    assert done.returncode == 0, done.stderr
    rewards = [row["reward"] for row in rows(project / "run" / "rollouts.jsonl")]
    assert rewards == [0.0] * 6 + [6.0] * 6


def test_inspect_and_export_read_a_run_back(project: Path) -> None:
    assert train(project, "training.steps=1").returncode == 0
    run = project / "run"
    sample = exported(run)[0]
    for arguments in ([], ["--session", sample["session"]], ["--drift"], ["--ledger"]):
        shown = steno("inspect", str(run), *arguments)
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.strip()
    turn = json.loads(steno("inspect", str(run), "--session", sample["session"], "--turn", "1", "--json").stdout)
    span = turn["turn"]
    sampled = [token for token in turn["tokens"] if token["mask"]]
    assert [token["id"] for token in sampled] == sample["ids"][span["start"] : span["end"]]
    assert np.allclose([t["logprob"] for t in sampled], sample["rollout_logprobs"][span["start"] : span["end"]])

    for arguments in (["inspect", str(project)], ["inspect", str(run), "--session", "steno_none"]):
        refused = steno(*arguments)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def exported(run: Path) -> list[dict[str, Any]]:
    """The run's samples, a branch a row."""
    file = run / "samples.jsonl"
    done = steno("export", str(run), "--format", "jsonl", "-o", str(file))
    assert done.returncode == 0, done.stderr
    return rows(file)


def steno(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([STENO, *arguments], capture_output=True, text=True, timeout=60, check=False)


BAD_INPUT = [
    (("training.stpes=1",), 2, "training.stpes"),
    (("model.path=/nowhere/model",), 2, "model.path"),
    (("agent.command=['no-such-agent']",), 2, "agent.command"),
    (("tasks.path=/nowhere/tasks.jsonl",), 2, "tasks.path"),
    (("tasks.path=/dev/null",), 2, "empty"),
    (("rollouts.max_staleness=1",), 2, "engine.weights"),
    (("judge.callable=json:loads",), 1, "judge"),
    (("agent.command=['false']",), 1, "exited with 1"),
]


@pytest.mark.parametrize(("settings", "code", "named"), BAD_INPUT, ids=[case[0][0] for case in BAD_INPUT])
def test_bad_input_is_one_line(project: Path, settings: tuple[str, ...], code: int, named: str) -> None:
    done = train(project, "training.steps=1", *settings)
    assert done.returncode == code, done.stderr
    error = [line for line in done.stderr.splitlines() if line.startswith("steno: ")]
    assert len(error) == 1, done.stderr
    assert named in error[0]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_run_that_fails_keeps_what_was_recorded(project: Path) -> None:
    (project / "judge.py").write_text(
        "import pathlib\ncount = pathlib.Path(__file__).with_name('count')\n"
        "def judge(task, outcome):\n"
        "    count.write_text(count.read_text() + 'x' if count.exists() else 'x')\n"
        "    assert len(count.read_text()) <= 6, 'no more'\n"
        "    return float(outcome.answer)\n"
    )
    done = train(project, "rollouts.max_concurrent=1")
    assert done.returncode == 1
    summary = json.loads((project / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 1)
    assert "no more" in summary["error"]
    assert len(rows(project / "run" / "metrics.jsonl")) == 1
    assert len(exported(project / "run")) == 12  # the second step's too, though nobody judged them


def test_a_full_disk_is_one_line_and_loses_nothing_before_it(project: Path) -> None:
    limit = 300_000  # bytes a file may have: the first step's records fit, later ones do not
    command = f"ulimit -f {limit // 1024}; exec {STENO} train {project / 'config.toml'} --run-dir {project / 'run'}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 1, done.stderr
    error = [line for line in done.stderr.splitlines() if line.startswith("steno: ")]
    assert len(error) == 1
    assert str(project / "run") in error[0]
    assert (project / "run" / "config.toml").exists()


def test_an_existing_run_is_not_written_over(project: Path) -> None:
    (project / "run").mkdir()
    (project / "run" / "notes").write_text("mine")
    done = train(project)
    assert done.returncode == 2
    assert "not empty" in done.stderr


@pytest.mark.parametrize(
    ("critic", "told"),
    [
        ("small", r"^steno: critic\.path: '.*small' knows 50 tokens, .* has 265; give the critic of a model that has"),
        ("model", r"^steno: critic\.path: .*model is not a critic"),
    ],
)
def test_a_critic_that_cannot_be_this_actors_is_one_line_before_the_first_rollout(
    project: Path, critic: str, told: str
) -> None:
    save_model(critic_from_actor(tiny_model(50), seed=0), project / "small")
    done = train(project, "algorithm.estimator=gae", f"critic.path={project / critic}")
    assert (done.returncode, (project / "run").exists()) == (2, False)
    assert [line for line in done.stderr.splitlines() if re.search(told, line)]
    assert "Traceback" not in done.stderr


def test_rollouts_may_run_ahead_of_the_trainer_on_a_copy_of_the_weights(project: Path) -> None:
    done = train(
        project, "engine.weights=copy", "rollouts.max_staleness=1", "training.steps=3", "algorithm.estimator=rloo"
    )
    assert done.returncode == 0, done.stderr
    samples = exported(project / "run")
    by_group: dict[str, set[int]] = {}
    for row in samples:
        by_group.setdefault(row["group_id"][:11], set()).update(version for version in row["versions"] if version >= 0)
    assert min(by_group["step-000002"]) == 0  # begun before the first step had been taken
    assert json.loads(done.stdout)["ledger"]["in_flight"] == 0


def test_an_interrupt_ends_the_run_and_its_agents_and_says_so(project: Path) -> None:
    (project / "agent.py").write_text("import time\nprint('waiting', flush=True)\ntime.sleep(600)\n")
    command = [STENO, "train", str(project / "config.toml"), "--run-dir", str(project / "run")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (agents := children(process.pid, "agent.py")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert agents
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == f"steno: interrupted; go on with: steno train --resume {project / 'run'}"
    assert "Traceback" not in stderr
    assert json.loads((project / "run" / "summary.json").read_text())["status"] == "interrupted"
    assert not any(Path(f"/proc/{pid}").exists() for pid in agents)


def children(pid: int, named: str) -> list[int]:
    """Direct children with `named` in their command, by the kernel's own list."""
    listed = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for some in listed for child in some if named in Path(f"/proc/{child}/cmdline").read_text()]
