"""Every example's config builds and takes a step; the model alone is swapped for one that needs no package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stenograph.config_loading import load_config
from stenograph.rendering import builtin_tokenizer
from stenograph.tasks import load_tasks
from support.models import tiny_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CONFIGS = sorted(EXAMPLES.rglob("*.toml"))
SMALL = (
    "rollouts.num_groups=1",
    "rollouts.group_size=2",
    "training.steps=1",
    "evaluation.every=0",
    "sampling.max_tokens=8",
)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_an_example_takes_a_step(config: Path, tmp_path: Path) -> None:
    tiny_model(len(builtin_tokenizer()), context_length=4096).save_pretrained(tmp_path / "model")
    builtin_tokenizer().save_pretrained(tmp_path / "model")
    renderer = [] if load_config(config).model.chat_template else ["model.renderer=qwen3"]
    command = [str(Path(sys.executable).parent / "steno"), "train", str(config), "--run-dir", str(tmp_path / "run")]
    for setting in (f"model.path={tmp_path / 'model'}", *renderer, *SMALL):
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["ledger"]["sampled"] > 0
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_bytes().splitlines()]
    assert [rollout["status"] for rollout in rollouts] == ["completed", "completed"]


def test_the_demos_held_out_tasks_are_others() -> None:
    config = load_config(EXAMPLES / "arithmetic" / "config.toml")
    trained = {task.prompt for task in load_tasks(config.tasks)}
    held_out = {task.prompt for task in load_tasks(config.evaluation.tasks, "evaluation.tasks")}
    assert not trained & held_out
