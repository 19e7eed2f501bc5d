"""Tokens a second of the local engine on the packaged model: one JSON row a case, the baseline beside it."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from stenograph.config import EngineConfig, ModelConfig
from stenograph.engines.base import Generate
from stenograph.engines.local import LocalEngine
from stenograph.models import PACKAGED, load_model
from stenograph.types import Sampling

NUM_PROMPT = 350  # tokens, shared by all but the last few
NUM_OWN = 16
NUM_OUTPUT = 40


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    concurrent: int
    dtype: str | None = None
    top_p: float = 1.0


async def measure(model: PreTrainedModel, case: Case, num_output: int) -> float:
    """Aggregate output tokens a second of one wave of concurrent requests, after a request that warms up."""
    config = EngineConfig.model_validate(
        {"weights": "copy", "dtype": case.dtype} if case.dtype is not None else {"weights": "shared"}
    )
    engine = LocalEngine(model, config)
    rng = np.random.default_rng(0)
    shared = rng.integers(100, 40_000, NUM_PROMPT - NUM_OWN)

    async def request(n: int) -> int:
        ids = np.concatenate([shared, rng.integers(100, 40_000, NUM_OWN)]).astype(np.int32)
        sampling = Sampling(max_tokens=n, top_p=case.top_p)
        return sum([len(chunk.ids) async for chunk in engine.generate(Generate(ids, sampling, "benchmark"))])

    try:
        await request(2)
        start = time.perf_counter()
        total = sum(await asyncio.gather(*[request(num_output) for _ in range(case.concurrent)]))
        return total / (time.perf_counter() - start)
    finally:
        await engine.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases and tokens")
    parser.add_argument("--threads", type=int, help="torch's; default: its own choice")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model = load_model(ModelConfig(path=PACKAGED))
    cases = [Case("float32@1", 1), Case("float32@8", 8), Case("float32@32", 32)]
    if not args.quick:
        cases += [Case("top_p@32", 32, top_p=0.9)]
        cases += [Case(f"bfloat16@{n}", n, "bfloat16") for n in (1, 8, 32)]
    baseline: float | None = None
    for case in cases:
        value = asyncio.run(measure(model, case, NUM_OUTPUT // 2 if args.quick else NUM_OUTPUT))
        baseline = baseline or value
        row = {"bench": "engine", "case": case.name, "metric": "tokens_per_s", "value": round(value, 1)}
        print(json.dumps(row | {"baseline": cases[0].name, "ratio": round(value / baseline, 2)}), flush=True)


if __name__ == "__main__":
    main()
