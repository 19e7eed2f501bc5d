"""Makes the Parquet files that verl reads: prompts to sample from again (rl), conversations to imitate (sft).

steno export runs/RUN --format parquet -o samples.parquet
python examples/interchange/verl_rows.py rl samples.parquet train.parquet --tasks tasks.jsonl
python examples/interchange/verl_rows.py sft samples.parquet sft.parquet --min-reward 1

verl renders and tokenises messages itself. Where the very ids matter, train on `ids` and `loss_mask` (trl_sft.py).
"""

from __future__ import annotations

import argparse
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]


def rl_rows(rows: list[Row], answers: dict[str, str], source: str) -> list[Row]:
    """One row a task: what its agent was asked first. `answers` are by task; verl's reward function gets them."""
    first: dict[str, Row] = {}
    for row in rows:
        if row["task_id"] is not None and row["role"] == "main":
            first.setdefault(row["task_id"], row)
    return [
        {
            "data_source": source,
            "prompt": [_message(m) for m in takewhile(lambda m: m["turn"] is None, row["messages"])],
            "ability": "agent",
            "reward_model": {"style": "rule", "ground_truth": answers.get(task, "")},
            "extra_info": {"split": "train", "index": index, "task_id": task},
        }
        for index, (task, row) in enumerate(first.items())
    ]


def sft_rows(rows: list[Row], min_reward: float) -> list[Row]:
    """The conversations of rows whose reward is at least `min_reward`, with the tools that stood there."""
    return [
        {"messages": [_message(m) for m in row["messages"]], "tools": [_tool(tool) for tool in row["tools"]]}
        for row in rows
        if row["reward"] is not None and row["reward"] >= min_reward
    ]


def _message(message: Row) -> Row:
    """Without what is not there, and without what no chat template knows."""
    return {name: value for name, value in message.items() if value is not None and name != "turn"}


def _tool(tool: Row) -> Row:
    return {"type": "function", "function": {**tool, "parameters": json.loads(tool["parameters"])}}


def write(rows: list[Row], path: str) -> None:
    """Tools are left out where no row has any. Arrow gives all tools the same fields, which not all of them bear."""
    if not any(row.get("tools") for row in rows):
        rows = [{name: value for name, value in row.items() if name != "tools"} for row in rows]
    elif not _has_one_type([row["tools"] for row in rows]):
        raise SystemExit("these tools have no common type in Arrow, and others would reach the model; use --no-tools")
    pq.write_table(pa.Table.from_pylist(rows), path)


def _has_one_type(tools: list[Any]) -> bool:
    try:
        return pa.array(tools).to_pylist() == tools and "struct<>" not in str(pa.array(tools).type)
    except pa.ArrowInvalid:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["rl", "sft"])
    parser.add_argument("file")
    parser.add_argument("output")
    parser.add_argument("--tasks", type=Path, help="rl: the run's tasks as JSONL, for their answers")
    parser.add_argument("--source", default="stenograph", help="rl: by which verl chooses its reward function")
    parser.add_argument("--min-reward", type=float, default=1.0, help="sft")
    parser.add_argument("--no-tools", action="store_true", help="sft: leave them out")
    given = parser.parse_args()
    if given.kind == "rl" and given.tasks is None:
        parser.error("rl needs --tasks, for the answers that verl's rewards compare with")
    rows = pq.read_table(given.file, columns=["task_id", "role", "reward", "messages", "tools"]).to_pylist()
    if given.kind == "rl":
        if not given.tasks.is_file():
            raise SystemExit(f"--tasks {given.tasks}: there is no such file; verl's rewards need the tasks' answers")
        tasks = map(json.loads, given.tasks.read_bytes().splitlines())
        made = rl_rows(rows, {task["id"]: task.get("answer") or "" for task in tasks}, given.source)
    else:
        made = sft_rows([{**row, "tools": []} if given.no_tools else row for row in rows], given.min_reward)
    if not made:
        raise SystemExit(f"{given.file} has no such rows; lower --min-reward, or export a run with tasks")
    write(made, given.output)


if __name__ == "__main__":
    main()
