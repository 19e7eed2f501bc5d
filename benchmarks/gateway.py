"""What the gateway adds to a turn, by the length of its session: gateway, engine and load are a process each.

One JSON row a figure, a naive gateway's (`naive_gateway.py`) under the same load beside it. The record is in memory;
rows of a `journal` have memory beside them, and those of a gateway that forwards each turn to another over the same
journal have that beside them (`forwarded`; the other one's CPU comes on top). `cpu_ms`: the gateway's own CPU a turn,
all its threads, from the kernel's account of its process, the median over rounds. `added_ms`: the median latency over
that of a direct call to the same engine. `peak_mb`: the most memory that the process ever had, with some 300 MB that it
starts with. On few cores the processes are in each other's way: the CPU is what counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from load import NUM_TURN, Measured, Plan, Target
from parts import HERE, Parts, fake_engine, memory_mb, percentiles, reply_ids, write_tokenizer

NUM_REPLY = 60  # tokens
LENGTHS = {"1k": 1_000, "8k": 8_000, "32k": 32_000, "128k": 128_000}
NUM_REQUESTS = 96  # a case, about


def put_under(target: Target, plan: Plan) -> Measured:
    command = [sys.executable, str(HERE / "load.py"), "--target", json.dumps(asdict(target))]
    done = subprocess.run([*command, "--plan", json.dumps(asdict(plan))], stdout=subprocess.PIPE, check=True)
    return Measured(**json.loads(done.stdout))


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
        through, past = (percentiles(one.latencies_s) for one in (measured, direct))
        return Figures(
            added_ms=1e3 * (through[0] - past[0]),
            added_p99_ms=1e3 * (through[1] - past[1]),
            requests_per_s=num / measured.seconds,
            cpu_ms=1e3 * median(measured.cpu_s),
            peak_mb=memory_mb(pid, "VmHWM"),
        )


def run(parts: Parts, length: str, concurrency: int, streams: tuple[bool, ...]) -> None:
    """One gateway process for a length and a concurrency, a naive one and one with a journal beside it."""
    plans = [_plan(LENGTHS[length], concurrency, stream) for stream in streams]
    engine = Target("engine", parts.engine, "", 1)
    direct = [put_under(engine, plan) for plan in plans]
    with parts.naive() as target:
        measured = [put_under(target, _for_naive(plan)) for plan in plans]
        naive = [Figures.of(*both, target.pid) for both in zip(measured, direct, strict=True)]
    cases = [f"{length}@{concurrency}/{'stream' if plan.stream else 'whole'}" for plan in plans]
    with parts.gateway() as target:
        ours = [Figures.of(put_under(target, plan), one, target.pid) for plan, one in zip(plans, direct, strict=True)]
    for case, figures, baseline in zip(cases, ours, naive, strict=True):
        tell(case, figures, "naive", baseline)
    store = f"sqlite:{parts.folder}/{length}-{concurrency}.db"
    with parts.gateway(store) as target:
        figures = Figures.of(put_under(target, plans[0]), direct[0], target.pid)
        with parts.gateway(store, f"gateway.public_url={target.url}") as owner:  # agents ask the first for its sessions
            forwarded = Figures.of(put_under(replace(owner, pid=target.pid), plans[0]), direct[0], target.pid)
    tell(f"{cases[0]}/journal", figures, "memory", ours[0])
    tell(f"{cases[0]}/forwarded", forwarded, "journal", figures)


def tell(case: str, figures: Figures, beside: str, baseline: Figures) -> None:
    for metric, value in asdict(figures).items():
        other = getattr(baseline, metric)
        row = {"bench": "gateway", "case": case, "metric": metric, "value": round(value, 2)}
        row |= {"baseline": f"{beside} {other:.2f}", "ratio": round(value / other, 3) if other > 0 else None}
        print(json.dumps(row), flush=True)


def _plan(num_tokens: int, concurrency: int, stream: bool) -> Plan:
    """A session is measured while it grows by a quarter, at most: there are several then, one after the other."""
    num_measured = max(2, min(24, num_tokens // NUM_TURN // 4, NUM_REQUESTS // concurrency))
    rounds = max(1, round(NUM_REQUESTS / concurrency / num_measured))
    return Plan(num_tokens, concurrency, stream, rounds, num_measured)


def _for_naive(plan: Plan) -> Plan:
    """It knows nothing of the turns before, so that none need be taken; and it takes its time."""
    return replace(plan, num_taken=0, rounds=max(1, plan.rounds // 4), num_measured=min(plan.num_measured, 4))


def _case(text: str) -> tuple[str, int]:
    length, _, concurrency = text.partition("@")
    if length not in LENGTHS or not concurrency.isdecimal() or not 1 <= int(concurrency) <= NUM_REQUESTS // 2:
        told = f"{text!r} is no case: give a length ({', '.join(LENGTHS)}) @ how many at a time, up to"
        raise argparse.ArgumentTypeError(f"{told} {NUM_REQUESTS // 2}")
    return length, int(concurrency)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="streamed alone; without --case, two lengths alone")
    parser.add_argument("--case", action="append", type=_case, metavar="LENGTH@CONCURRENCY", help="as 32k@1")
    parser.add_argument("--per-event", type=int, default=8, help="tokens in an event of the engine")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds between the engine's events")
    args = parser.parse_args()
    lengths = ("1k", "32k") if args.quick else tuple(LENGTHS)
    cases = args.case or [(length, concurrency) for length in lengths for concurrency in (1, 32)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tokenizer = write_tokenizer(folder)
        reply = reply_ids(tokenizer, NUM_REPLY)
        engine = stack.enter_context(fake_engine(reply, args.pace, args.per_event))
        streams = (True,) if args.quick else (True, False)
        for length, concurrency in cases:
            run(Parts(folder, engine), length, concurrency, streams)


if __name__ == "__main__":
    main()
