"""Seconds of one training step, SmolLM2-135M's shape with random weights: shared prompts against repeated ones.

Four groups of eight samples: a prompt of 350 tokens, then output 30, context 20, output 15. `--quick`: two groups of
four and a small model. One JSON object per row on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stenograph.config import Config, TrainingConfig
from stenograph.training.trainer import Trainer
from stenograph.types import Sample, TurnSpan

SMOLLM2_135M = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
)
SMALL = LlamaConfig(
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=3,
    num_key_value_heads=1,
    vocab_size=8192,
    tie_word_embeddings=True,
)
PROMPT, OUTPUT, CONTEXT, LAST = 350, 30, 20, 15


@dataclass(frozen=True)
class Case:
    name: str
    share: bool
    autocast: str | None
    pack_max_tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--packs", type=int, nargs="*", default=[1024], help="pack_max_tokens to try")
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    model_config, num_groups, group_size = (SMALL, 2, 4) if arguments.quick else (SMOLLM2_135M, 4, 8)
    for pack_max_tokens in arguments.packs:
        for autocast in (None, "bfloat16"):
            baseline: float | None = None
            for share in (False, True):
                name = f"{'shared' if share else 'repeated'}_{autocast or 'float32'}@{pack_max_tokens}"
                case = Case(name, share, autocast, pack_max_tokens)
                samples = make_samples(num_groups, group_size, model_config.vocab_size, share)
                seconds, tokens = measure(case, model_config, samples, arguments.threads, arguments.repeats)
                row = {"bench": "train", "case": name, "metric": "s_per_step", "value": round(seconds, 3)}
                if baseline is not None:
                    row |= {
                        "baseline": name.replace("shared", "repeated"),
                        "ratio": round(seconds / baseline, 3),
                    }
                else:
                    baseline = seconds
                print(json.dumps(row | {"forward_tokens": tokens}), flush=True)


def measure(
    case: Case, model_config: LlamaConfig, samples: list[Sample], threads: int, repeats: int
) -> tuple[float, int]:
    """The fastest of `repeats` steps after one that warms up, and the token positions that it computed."""
    torch.manual_seed(0)
    training = TrainingConfig.model_validate(
        {"autocast": case.autocast, "num_threads": threads, "pack_max_tokens": case.pack_max_tokens, "lr": 1e-6}
    )
    trainer = Trainer(LlamaForCausalLM(model_config), Config(training=training))
    reports = [trainer.step(samples) for _ in range(repeats + 1)]
    print(f"{case.name}: {[round(r.seconds, 2) for r in reports]}", file=sys.stderr)
    return min(r.seconds for r in reports[1:]), reports[-1].num_forward_tokens


def make_samples(num_groups: int, group_size: int, vocab_size: int, share: bool) -> list[Sample]:
    """Groups that share their prompt; without `share`, its first id differs in each sample, so that nothing is."""
    rng = np.random.default_rng(0)
    samples = []
    for group in range(num_groups):
        prompt = rng.integers(0, vocab_size, PROMPT)
        for member in range(group_size):
            ids = np.concatenate([prompt, rng.integers(0, vocab_size, OUTPUT + CONTEXT + LAST)]).astype(np.int32)
            if not share:
                ids[0] = len(samples)
            spans = [(PROMPT, PROMPT + OUTPUT), (len(ids) - LAST, len(ids))]
            mask = np.zeros(len(ids), bool)
            for start, end in spans:
                mask[start:end] = True
            samples.append(
                Sample(
                    session=f"steno_{len(samples)}",
                    branch=0,
                    role="main",
                    rollout_id=f"r{len(samples)}",
                    group_id=f"g{group}",
                    task_id=None,
                    reward=float(member % 2),
                    ids=ids,
                    loss_mask=mask,
                    rollout_logprobs=np.where(mask, -np.log(vocab_size), 0).astype(np.float32),
                    versions=np.where(mask, 0, -1).astype(np.int32),
                    turns=tuple(TurnSpan(f"t{s}", s, e, "eos", 1.0, 1.0, "processed") for s, e in spans),
                )
            )
    return samples


if __name__ == "__main__":
    main()
