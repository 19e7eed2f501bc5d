"""What the gateway's benchmarks run, a process each: gateway, naive gateway, engine. They are measured from outside."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from load import WORDS, Target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
MARKERS = ["<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE to which each of the load's words is a token, with Qwen3's markers and ids of six digits."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    rng = random.Random(0)
    core.train_from_iterator([" ".join(rng.choices(WORDS, k=200)) for _ in range(500)], trainer)
    written = json.loads(core.to_str())
    vocab = written["model"]["vocab"]
    written["model"]["vocab"] = {token: id + 100_000 for token, id in vocab.items()}
    core = Tokenizer.from_str(json.dumps(written))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=MARKERS
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


@contextmanager
def fake_engine(reply: list[int], pace_s: float = 0.0, per_event: int = 8) -> Iterator[str]:
    """Its address."""
    command = [sys.executable, str(HERE / "fake_engine.py"), "--reply", str(reply)]
    with started(*command, "--pace", str(pace_s), "--per-event", str(per_event)) as (ready, _):
        yield ready["url"]


def reply_ids(tokenizer: PreTrainedTokenizerFast, num_tokens: int) -> list[int]:
    """What the engine says: words, and the end of the turn behind them."""
    words = " ".join(random.Random(1).choices(WORDS, k=num_tokens))
    return [*tokenizer.encode(words)[:num_tokens], *tokenizer.encode("<|im_end|>")]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a case is run with."""

    folder: Path  # of the tokenizer
    engine: str

    @contextmanager
    def gateway(self, store: str = "memory", *settings: str) -> Iterator[Target]:
        """`store` and `settings` as `steno serve` takes them by --store and --set."""
        steno = str(Path(sys.executable).parent / "steno")
        settings = ("model.renderer=qwen3", "model.thinking_retention=all", *settings)
        command = [steno, "serve", "--port", "0", "--model", str(self.folder), "--engine", f"vllm:{self.engine}"]
        with started(*command, "--store", store, *[word for one in settings for word in ("--set", one)]) as (
            ready,
            pid,
        ):
            yield Target("gateway", ready["url"], ready["admin_key"], pid)

    @contextmanager
    def naive(self) -> Iterator[Target]:
        script = str(HERE / "naive_gateway.py")
        command = [sys.executable, script, "--model", str(self.folder), "--engine", self.engine]
        with started(*command) as (ready, pid):
            yield Target("naive", ready["url"], "", pid)


@contextmanager
def started(*command: str) -> Iterator[tuple[dict[str, Any], int]]:
    """A process that says on one line of JSON when it is ready."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline()), process.pid
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def memory_mb(pid: int, name: str) -> float:
    """`VmRSS`, what a process holds of the machine's memory, or `VmHWM`, the most that it ever held."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def percentiles(values: list[float]) -> tuple[float, float]:
    """The median and the 99th."""
    cuts = quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]
