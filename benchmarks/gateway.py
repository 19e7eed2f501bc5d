"""What the gateway adds to a turn, by the length of its session: gateway, engine and load are a process each.

One JSON row a figure. CPU is the gateway's own, all its threads, from the kernel's account of its process; its ratio is
to a naive gateway (`naive_gateway.py`) under the same load. Latency is what is added to a direct call to the same
engine. On few cores the three processes are in each other's way: the CPU is what counts.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from load import WORDS, Measured, Plan, Target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
MARKERS = ["<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
NUM_REPLY = 60  # tokens
LENGTHS = {"1k": 1_000, "8k": 8_000, "32k": 32_000, "128k": 128_000}
NUM_REQUESTS = 100  # a case, about


# --- the parts -----------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class Parts:
    """What a case is run with."""

    folder: Path  # of the tokenizer
    engine: str

    @contextmanager
    def gateway(self) -> Iterator[Target]:
        steno = str(Path(sys.executable).parent / "steno")
        settings = ["model.renderer=qwen3", "model.thinking_retention=all"]
        command = [steno, "serve", "--port", "0", "--model", str(self.folder), "--engine", f"vllm:{self.engine}"]
        with started(*command, *[word for one in settings for word in ("--set", one)]) as (ready, pid):
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


def put_under(target: Target, plan: Plan) -> Measured:
    command = [sys.executable, str(HERE / "load.py"), "--target", json.dumps(asdict(target))]
    done = subprocess.run([*command, "--plan", json.dumps(asdict(plan))], stdout=subprocess.PIPE, check=True)
    return Measured(**json.loads(done.stdout))


def peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


# --- the cases -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """What one case came to."""

    added_ms: float
    added_p99_ms: float
    requests_per_s: float
    cpu_ms: float
    peak_mb: float

    @staticmethod
    def of(measured: Measured, direct: Measured, pid: int) -> Figures:
        num = len(measured.latencies_s)
        through, past = (_percentiles(one.latencies_s) for one in (measured, direct))
        return Figures(
            added_ms=1e3 * (through[0] - past[0]),
            added_p99_ms=1e3 * (through[1] - past[1]),
            requests_per_s=num / measured.seconds,
            cpu_ms=1e3 * median(measured.cpu_s),
            peak_mb=peak_mb(pid),
        )


def _percentiles(values: list[float]) -> tuple[float, float]:
    """The median and the 99th."""
    cuts = quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]


def run(parts: Parts, length: str, concurrency: int, streams: tuple[bool, ...], num_requests: int) -> None:
    """One gateway process for a length and a concurrency, and a naive one beside it; a row for each figure."""
    plans = [_plan(LENGTHS[length], concurrency, stream, num_requests) for stream in streams]
    engine = Target("engine", parts.engine, "", 1)
    direct = [put_under(engine, plan) for plan in plans]
    with parts.naive() as target:
        naive = [Figures.of(put_under(target, plan), one, target.pid) for plan, one in zip(plans, direct, strict=True)]
    with parts.gateway() as target:
        for plan, one, baseline in zip(plans, direct, naive, strict=True):
            figures = Figures.of(put_under(target, plan), one, target.pid)
            case = f"{length}@{concurrency}/{'stream' if plan.stream else 'whole'}"
            for metric, value in asdict(figures).items():
                row = {"bench": "gateway", "case": case, "metric": metric, "value": round(value, 2)}
                beside = getattr(baseline, metric)
                row |= {"baseline": f"naive {beside:.2f}", "ratio": round(value / beside, 3) if beside > 0 else None}
                print(json.dumps(row), flush=True)


def _plan(num_tokens: int, concurrency: int, stream: bool, num_requests: int) -> Plan:
    plan = Plan(num_tokens, concurrency, stream, rounds=1)
    return Plan(num_tokens, concurrency, stream, max(1, round(num_requests / concurrency / plan.num_measured)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two lengths, streamed")
    parser.add_argument("--case", action="append", metavar="LENGTH@CONCURRENCY", help="only these, as 32k@1")
    args = parser.parse_args()
    lengths = ("1k", "32k") if args.quick else tuple(LENGTHS)
    cases = args.case or [f"{length}@{concurrency}" for length in lengths for concurrency in (1, 32)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tokenizer = write_tokenizer(folder)
        words = " ".join(random.Random(1).choices(WORDS, k=NUM_REPLY))
        reply = [*tokenizer.encode(words)[:NUM_REPLY], tokenizer.eos_token_id]
        engine, _ = stack.enter_context(started(sys.executable, str(HERE / "fake_engine.py"), "--reply", str(reply)))
        for case in cases:
            length, _, concurrency = case.partition("@")
            streams = (True,) if args.quick else (True, False)
            run(Parts(folder, engine["url"]), length, int(concurrency), streams, NUM_REQUESTS)


if __name__ == "__main__":
    main()
