"""A run leaves as a file, is read by pandas, datasets, TRL and verl's loaders, and comes back the same."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stenograph.cli import main
from stenograph.rendering import builtin_tokenizer
from stenograph.traces.session import Disposition, Opening
from stenograph.traces.sqlite import SqliteTraceStore
from stenograph.types import Message, Reply, Sampling, Tool, ToolCall
from support.models import tiny_model
from support.tokenizers import CHATML
from support.turns import make_turn, user

ROOT = Path(__file__).parents[2]
LOOK = Tool("look", "looks it up", {"type": "object", "properties": {"word": {"type": "string"}}})


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    stdout: str
    stderr: str


def steno(*arguments: str | Path) -> Done:
    """A command, in this process: `datasets` takes a second to import."""
    out, err, code = StringIO(), StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["steno", *map(str, arguments)])
        try:
            main()
        except SystemExit as e:
            code = int(str(e.code or 0))
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six sessions of two tasks: a call of a tool, its result, two answers, of which one was greedy."""
    folder = tmp_path_factory.mktemp("run")
    store = SqliteTraceStore(folder / "traces.db")
    for n in range(6):
        session = f"steno_{n}"
        task = {"rollout_id": f"r{n}", "group_id": f"g{n // 3}", "task_id": f"t{n // 3}"}
        store.open(Opening(session, task))
        calling = make_turn([1, 2, 3 + n], [10, 11, 12], asked=[user(f"What is {n // 3}?")], tools=(LOOK,))
        call = ToolCall("call_1", "look", f'{{"word": "{n}"}}')
        calling = replace(calling, reply=Reply("", "I should look.", (call,)))
        store.commit(session, None, calling)
        result = Message("tool", f"it is {n}", tool_call_id="call_1")
        answers = [
            make_turn([20, 21], [30 + n, 31], asked=[result], said="so it is", tools=(LOOK,), sampling=sampling)
            for sampling in (Sampling(), Sampling(temperature=0.0))
        ]
        store.commit(session, calling.id, *answers)
        store.seal(session, reward=float(n % 2), status="completed", turn_rewards=[n / 7, -1.0])
        if n < 3:
            store.settle(session, Disposition("trained"))
            store.release([session])
    store.close()
    return folder


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run in every format."""
    folder = tmp_path_factory.mktemp("exported")
    for format, name in (("jsonl", "samples.jsonl"), ("parquet", "samples.parquet"), ("hf", "samples")):
        done = steno("export", run, "--format", format, "-o", folder / name)
        assert done.code == 0, done.stderr
        assert json.loads(done.stdout) == {"file": str(folder / name), "sessions": 6, "rows": 12, "left_out": 0}
    return folder


def rows_of(exported: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (exported / "samples.jsonl").read_bytes().splitlines()]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "interchange" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_imported_run_exports_to_the_same_bytes(exported: Path, tmp_path: Path) -> None:
    source, before = exported / "samples", (exported / "samples.jsonl").read_bytes()
    for n in range(2):  # from a folder of datasets, and from a run that was imported itself
        assert steno("import", source, "--run-dir", tmp_path / f"run{n}").code == 0
        source = tmp_path / f"{n}.jsonl"
        assert steno("export", tmp_path / f"run{n}", "-o", source).code == 0
        assert source.read_bytes() == before


def test_what_cannot_be_exported_or_imported_is_one_line_and_exit_2(run: Path, exported: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes((exported / "samples.jsonl").read_bytes()[:-9])
    for arguments in (
        ("export", tmp_path, "-o", tmp_path / "file"),
        ("export", run, "--format", "csv", "-o", tmp_path / "file"),
        ("export", run, "--format", "hf", "-o", exported / "samples"),
        ("export", run, "-o", run / "traces.db"),
        ("export", run, "-o", run / "traces.db-wal"),
        ("import", cut, "--run-dir", tmp_path / "new"),
        ("import", exported / "samples.jsonl", "--run-dir", exported),
    ):
        refused = steno(*arguments)
        assert (refused.code, refused.stderr.count("\n"), refused.stdout) == (2, 1, ""), refused.stderr


def test_the_snippets_of_the_page_run(exported: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.chdir(exported)
    page = (ROOT / "docs" / "interchange.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(snippets) == 2
    for snippet in snippets:
        exec(compile(snippet, "docs/interchange.md", "exec"), {})


# What TRL says of itself on a machine without an accelerator.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning")
def test_trl_trains_on_the_sampled_ids_and_no_others(exported: Path, tmp_path: Path) -> None:
    tiny_model(len(builtin_tokenizer())).save_pretrained(tmp_path / "model")
    builtin_tokenizer().save_pretrained(tmp_path / "model")
    file, model, output = (str(path) for path in (exported / "samples.parquet", tmp_path / "model", tmp_path / "out"))
    training = example("trl_sft").trainer(file, model, output, min_reward=1.0, max_steps=2)
    seen: list[tuple[list[int], list[int]]] = []
    compute_loss = training.compute_loss

    def noting(model: Any, inputs: dict[str, Any], *rest: Any, **options: Any) -> Any:
        for ids, labels, mask in zip(inputs["input_ids"], inputs["labels"], inputs["attention_mask"], strict=True):
            seen.append((ids[mask == 1].tolist(), labels[mask == 1].tolist()))
        return compute_loss(model, inputs, *rest, **options)

    training.compute_loss = noting
    training.train()
    rewarded = [row for row in rows_of(exported) if row["reward"] == 1.0 and any(row["loss_mask"])]
    wanted = {
        (tuple(row["ids"]), tuple(id if mask else -100 for id, mask in zip(row["ids"], row["loss_mask"], strict=True)))
        for row in rewarded
    }
    assert len(wanted) == 3
    assert {(tuple(ids), tuple(labels)) for ids, labels in seen} == wanted
    assert training.state.global_step == 2
    assert training.state.log_history[-1]["train_loss"] > 0


def test_verl_finds_what_its_loaders_ask_for(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas as pd
    from datasets import load_dataset

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "t0", "prompt": "What is 0?", "answer": "0"}\n{"id": "t1", "prompt": "What is 1?"}\n')
    verl_rows, source = example("verl_rows"), str(exported / "samples.parquet")
    for arguments in (
        ["rl", source, str(tmp_path / "rl.parquet"), "--tasks", str(tasks), "--source", "mine"],
        ["sft", source, str(tmp_path / "sft.parquet")],
    ):
        monkeypatch.setattr(sys, "argv", ["verl_rows.py", *arguments])
        verl_rows.main()
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = CHATML

    # RLHFDataset: `datasets` reads; the prompt is rendered; the reward function gets source, truth and extra_info.
    prompts: list[Any] = list(load_dataset("parquet", data_files=str(tmp_path / "rl.parquet"), split="train"))
    shown = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in prompts
    ]
    assert shown == [f"<|im_start|>user\nWhat is {n}?<|im_end|>\n<|im_start|>assistant\n" for n in range(2)]
    assert [(row["data_source"], row["ability"], row["reward_model"]["ground_truth"]) for row in prompts] == [
        ("mine", "agent", "0"),
        ("mine", "agent", ""),
    ]
    assert [row["reward_model"]["style"] for row in prompts] == ["rule", "rule"]
    assert [row["extra_info"].get("index", 0) for row in prompts] == [0, 1]
    assert prompts[0]["extra_info"].get("tools_kwargs", {}) == {}

    # MultiTurnSFTDataset: pandas reads with Arrow's types; messages are rendered one by one, tools with the first.
    look = {"name": LOOK.name, "description": LOOK.description, "parameters": LOOK.parameters}
    frame = pd.read_parquet(tmp_path / "sft.parquet", dtype_backend="pyarrow")
    assert list(frame.columns) == ["messages", "tools"]
    for messages, tools in zip(frame["messages"].tolist(), frame["tools"].tolist(), strict=True):
        assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
        assert all(isinstance(message["content"], str) for message in messages)
        assert all(tokenizer.apply_chat_template([message], tokenize=False) for message in messages)
        assert messages[1]["tool_calls"][0]["function"]["name"] == "look"
        assert list(tools) == [{"type": "function", "function": look}]
    assert len(frame) == 6
