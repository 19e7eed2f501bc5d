"""Learning shown: GRPO and PPO, three seeds each and a control, the same held-out tasks before and after.

python examples/arithmetic/learn.py [--steps N] [--only ALGORITHM]...

Writes docs/learning.md and its picture once every run is there; a finished run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CONFIGS = {"GRPO": HERE / "config.toml", "PPO": HERE.parent / "ppo_arithmetic.toml"}
CASES = {
    **{f"{algorithm} seed {n}": [f"training.seed={n}", f"tasks.seed={n}"] for algorithm in CONFIGS for n in (1, 2, 3)},
    "GRPO control": ["training.seed=1", "tasks.seed=1", "training.shuffle_rewards=true"],
}
GAIN, DRIFT, EXPLAINED = 0.3, 0.1, 0.2

Rows = list[dict[str, Any]]


def settings(steps: int) -> list[str]:
    return [
        f"training.steps={steps}",
        f"evaluation.every={steps}",
        "training.checkpoint_every=0",
        "evaluation.num_samples=4",
        "evaluation.max_tasks=64",
        "evaluation.tasks.size=64",
        # The same agent as a coroutine: an evaluation would otherwise start 256 interpreters.
        "agent.command=[]",
        f"agent.callable={HERE / 'agent.py'}:attempt",
    ]


def run(name: str, steps: int, folder: Path) -> None:
    config = CONFIGS[name.partition(" ")[0]]
    shutil.rmtree(folder, ignore_errors=True)
    command = [str(Path(sys.executable).parent / "steno"), "train", str(config), "--run-dir", str(folder)]
    command += [word for setting in [*settings(steps), *CASES[name]] for word in ("--set", setting)]
    print(f"{name}: {' '.join(command)}", flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def is_finished(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.exists() and json.loads(summary.read_bytes())["status"] == "completed"


def rows_of(folder: Path) -> Rows:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def steps_of(rows: Rows) -> Rows:
    return [row for row in rows if "reward_mean" in row]


def change(rows: Rows) -> tuple[float, float]:
    """Success before and after, on 64 tasks x 4 attempts."""
    values = [row["eval_reward_mean"] for row in rows if "eval_reward_mean" in row]
    return values[0], values[-1]


def explained(rows: Rows) -> list[float]:
    """The critic's explained variance, of the steps whose returns vary."""
    return [row["explained_variance"] for row in steps_of(rows) if row.get("explained_variance") is not None]


def explained_at_last(folder: Path, steps: int) -> float:
    """The same over all trainable tokens of the last third of the steps, taken together.

    A single step in which every attempt succeeds has next to no variance, and then its share says little.
    """
    values, returns = [], []
    for step in range(steps - math.ceil(steps / 3) + 1, steps + 1):
        with np.load(folder / "tokens" / f"step-{step:06d}.npz") as arrays:
            for branch in sorted({name.rpartition("/")[0] for name in arrays if "/" in name}):
                mask = arrays[f"{branch}/loss_mask"]
                values.append(arrays[f"{branch}/values"][mask])
                returns.append(arrays[f"{branch}/returns"][mask])
    value, earned = np.concatenate(values, dtype=np.float64), np.concatenate(returns, dtype=np.float64)
    return float(1 - np.var(earned - value) / np.var(earned))


def draw(results: dict[str, Rows], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    rewards, values = figure.subplots(1, 2)
    colours = {"GRPO": "tab:blue", "PPO": "tab:orange"}
    for name, rows in results.items():
        algorithm = name.partition(" ")[0]
        style = {"color": colours[algorithm], "linestyle": ":" if "control" in name else "-", "marker": "."}
        tokens, total = [], 0
        for row in steps_of(rows):
            total += row["num_sampled_tokens"]
            tokens.append(total)
        shown = name.partition(" seed")[0]
        label = shown if "control" in name or name.endswith(" 1") else None
        rewards.plot(tokens, [row["reward_mean"] for row in steps_of(rows)], label=label, **style)
        if algorithm == "PPO":
            known = [
                (row["step"], row["explained_variance"])
                for row in steps_of(rows)
                if row["explained_variance"] is not None
            ]
            values.plot(*zip(*known, strict=True), label=name, marker=".")
    rewards.set(xlabel="sampled tokens", ylabel="mean reward of a step's 32 attempts", title="reward")
    values.set(xlabel="step", title="the critic's explained variance", ylim=(-1, 1))
    for axes in (rewards, values):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def table(results: dict[str, Rows]) -> str:
    lines = [
        "| run | held out before | after | change | sampled tokens | training reward by step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, rows in results.items():
        before, after = change(rows)
        tokens = sum(row["num_sampled_tokens"] for row in steps_of(rows))
        curve = " ".join(f"{row['reward_mean']:.2f}" for row in steps_of(rows))
        lines.append(f"| {name} | {before:.3f} | {after:.3f} | {after - before:+.3f} | {tokens} | {curve} |")
    return "\n".join(lines)


def explained_table(results: dict[str, Rows], at_last: dict[str, float]) -> str:
    lines = ["| run | explained variance by step | over the last third |", "| --- | --- | --- |"]
    for name, share in at_last.items():
        shown = " ".join(f"{value:.2f}" for value in explained(results[name]))
        lines.append(f"| {name} | {shown} | {share:.2f} |")
    return "\n".join(lines)


def verdict(results: dict[str, Rows], at_last: dict[str, float]) -> tuple[str, bool]:
    """What the runs show, and whether it is what is promised."""
    told, good = [], True
    changes = {name: after - before for name, rows in results.items() for before, after in [change(rows)]}
    for algorithm in CONFIGS:
        gains = [gain for name, gain in changes.items() if name.startswith(f"{algorithm} seed")]
        if gains:
            told.append(f"{algorithm}: {sum(g >= GAIN for g in gains)} of {len(gains)} seeds gained at least {GAIN}")
            good &= sum(g >= GAIN for g in gains) >= 2
    if at_last:
        enough = sum(share > EXPLAINED for share in at_last.values())
        told.append(f"in {enough} of {len(at_last)} the critic explains more than {EXPLAINED} in the last third")
        good &= enough >= 2
    if "GRPO control" in changes:
        drift = changes["GRPO control"]
        told.append(f"the control changed by {drift:+.3f} (allowed: {DRIFT} either way)")
        good &= abs(drift) <= DRIFT
    return "; ".join(told), good


def cost(results: dict[str, Rows]) -> str:
    """How many more positions a step of PPO computes with gradients."""
    means = {}
    for algorithm in CONFIGS:
        rows = [row for name, rows in results.items() if name.startswith(f"{algorithm} seed") for row in steps_of(rows)]
        means[algorithm] = sum(row["num_forward_tokens"] for row in rows) / len(rows)
    more = means["PPO"] / means["GRPO"]
    return f"{more:.1f} times as many positions with gradients"


TEXT = """# Learning, shown

`make learn` makes these runs and writes this page; `make learn-ppo` makes those of PPO alone.

The task is `examples/arithmetic`: three-digit `+ - *` for SmolLM2-135M-Instruct, which cannot do it in its head, with
a calculator tool. 4 tasks x 8 attempts a step, {steps} steps, AdamW 1e-5 for the actor, float32 on CPU. GRPO runs
`examples/arithmetic/config.toml`, PPO with a learned critic `examples/ppo_arithmetic.toml`, at as many attempts a step.
Success is measured on 64 held-out tasks x 4 attempts at temperature 1, before the first step and after the last. The
control has the rewards of each step shuffled over its attempts: the same optimizer, but nothing to learn.

{table}

{verdict}.

![reward and explained variance](learning.png)

How much of the variance of the returns the critic explained before each step's updates:

{explained}

A critic that is new explains nothing, and a task that is solved leaves nothing to explain: where every attempt of a
step succeeds, its returns hardly vary, and the share is one of two numbers near 0. So the last third is taken together.

`make demo` stays with GRPO, whose groups of attempts are a baseline already: PPO gains as much in as many steps here,
and each of its steps computes the critic as well, {cost}.

```
python examples/arithmetic/learn.py --steps {steps}
```

Each run is `steno train` with {settings},
the agent a coroutine (`agent.py:attempt`) in place of a process per attempt, and the seeds of the table.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", action="append", choices=CONFIGS, help="run this algorithm alone")
    arguments = parser.parse_args()
    folder = ROOT / "runs" / f"learn-{arguments.steps}"
    folders = {name: folder / name.replace(" ", "-") for name in CASES}
    for name, where in folders.items():
        asked = not arguments.only or name.partition(" ")[0] in arguments.only
        if asked and not is_finished(where):
            run(name, arguments.steps, where)
    results = {name: rows_of(where) for name, where in folders.items() if is_finished(where)}
    at_last = {name: explained_at_last(folders[name], arguments.steps) for name in results if name.startswith("PPO")}
    told, good = verdict(results, at_last)
    print(f"{table(results)}\n\n{explained_table(results, at_last)}\n\n{told}")
    if len(results) == len(CASES):
        set_to = ", ".join(f"`{setting}`" for setting in settings(arguments.steps)[:6])
        text = TEXT.format(
            table=table(results),
            explained=explained_table(results, at_last),
            verdict=told,
            cost=cost(results),
            steps=arguments.steps,
            settings=set_to,
        )
        (ROOT / "docs" / "learning.md").write_text(text)
        draw(results, ROOT / "docs" / "learning.png")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
