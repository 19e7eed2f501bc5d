"""Learning shown: three seeds and a control, the same held-out tasks before and after; writes docs/learning.md.

python examples/arithmetic/learn.py [--steps N] [--only NAME]...
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CONFIG = HERE / "config.toml"
CASES = {
    "seed 1": ["training.seed=1", "tasks.seed=1"],
    "seed 2": ["training.seed=2", "tasks.seed=2"],
    "seed 3": ["training.seed=3", "tasks.seed=3"],
    "control": ["training.seed=1", "tasks.seed=1", "training.shuffle_rewards=true"],
}
GAIN, DRIFT = 0.3, 0.1


def settings(steps: int) -> list[str]:
    return [
        f"training.steps={steps}",
        f"evaluation.every={steps}",
        "evaluation.num_samples=4",
        "evaluation.max_tasks=64",
        "evaluation.tasks.size=64",
        # The same agent as a coroutine: an evaluation would otherwise start 256 interpreters.
        "agent.command=[]",
        f"agent.callable={HERE / 'agent.py'}:attempt",
    ]


def run(name: str, steps: int, folder: Path) -> list[dict[str, Any]]:
    """One run's rows; a finished run is not repeated."""
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        command = [str(Path(sys.executable).parent / "steno"), "train", str(CONFIG), "--run-dir", str(folder)]
        command += [word for setting in [*settings(steps), *CASES[name]] for word in ("--set", setting)]
        print(f"{name}: {' '.join(command)}", flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def held_out(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Success before and after, on 64 tasks x 4 attempts."""
    values = [row["eval_reward_mean"] for row in rows if "eval_reward_mean" in row]
    return values[0], values[-1]


def draw(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, rows in results.items():
        points = [(row["step"], row["reward_mean"]) for row in rows if "reward_mean" in row]
        axes.plot(*zip(*points, strict=True), marker="o", linestyle="--" if name == "control" else "-", label=name)
    axes.set(
        xlabel="step", ylabel="mean reward of a step's 32 attempts", title="SmolLM2-135M learns to use a calculator"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def report(results: dict[str, list[dict[str, Any]]], steps: int) -> tuple[str, bool]:
    lines = ["| run | held out before | after | change | training reward by step |", "| --- | --- | --- | --- | --- |"]
    changes = {}
    for name, rows in results.items():
        before, after = held_out(rows)
        changes[name] = after - before
        curve = " ".join(f"{row['reward_mean']:.2f}" for row in rows if "reward_mean" in row)
        lines.append(f"| {name} | {before:.3f} | {after:.3f} | {after - before:+.3f} | {curve} |")
    gains = sum(change >= GAIN for name, change in changes.items() if name != "control")
    good = gains >= 2 and abs(changes.get("control", 0.0)) <= DRIFT
    verdict = f"{gains} of {sum(name != 'control' for name in changes)} seeds gained at least {GAIN} on held-out tasks"
    if "control" in changes:
        verdict += f"; the control changed by {changes['control']:+.3f} (allowed: {DRIFT} either way)"
    return TEXT.format(
        table="\n".join(lines), verdict=verdict, steps=steps, settings=" ".join(settings(steps)[:5])
    ), good


TEXT = """# Learning, shown

`make learn` runs three seeds and a control, and writes this page.

The task is `examples/arithmetic`: three-digit `+ - *` for SmolLM2-135M-Instruct, which cannot do it in its head, with
a calculator tool. GRPO, 4 tasks x 8 attempts a step, {steps} steps, AdamW 1e-5, float32 on CPU. Success is measured on
64 held-out tasks x 4 attempts at temperature 1, before the first step and after the last. The control has the rewards
of each step shuffled over its attempts: the same optimizer and as many tokens, but nothing to learn.

{table}

{verdict}.

![reward by step](learning.png)

```
python examples/arithmetic/learn.py --steps {steps}
```

It runs `steno train` with `examples/arithmetic/config.toml` and `{settings}`, the agent as a
coroutine (`agent.py:attempt`) in place of a process per attempt, and the seeds of the table.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", action="append", choices=CASES, help="run these cases alone")
    arguments = parser.parse_args()
    folder = ROOT / "runs" / f"learn-{arguments.steps}"
    names = arguments.only or list(CASES)
    results = {name: run(name, arguments.steps, folder / name.replace(" ", "-")) for name in names}
    text, good = report(results, arguments.steps)
    draw(results, ROOT / "docs" / "learning.png")
    (ROOT / "docs" / "learning.md").write_text(text)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
