"""Seconds of one training step, SmolLM2-135M's shape with random weights: shared prompts against repeated ones, and PPO
with a critic, as by default, against GRPO.

Groups of eight samples: a prompt of 350 tokens, then output 30, context 20, output 15. `--quick`: a small model and
groups of four. One JSON object per row on stdout; `cpu_s` is the time that all threads ran, which a busy machine
disturbs less.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stenograph.config import AlgorithmConfig, Config, TrainingConfig
from stenograph.training.critic import critic_from_actor
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
class Measured:
    seconds: float
    cpu_s: float
    forward_tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pack-max-tokens", type=int, default=1024)
    parser.add_argument("--autocast", choices=["none", "bfloat16"], nargs="*", default=["none", "bfloat16"])
    parser.add_argument("--shared-only", action="store_true", help="leave the slow baseline out")
    arguments = parser.parse_args()
    model_config, group_size = (SMALL, 4) if arguments.quick else (SMOLLM2_135M, 8)

    for autocast in arguments.autocast:
        training = TrainingConfig.model_validate(
            {
                "autocast": None if autocast == "none" else autocast,
                "num_threads": arguments.threads,
                "pack_max_tokens": arguments.pack_max_tokens,
                "lr": 1e-6,
            }
        )
        before: tuple[str, float] | None = None  # the case before, which each is compared with
        for name in ("shared", "ppo") if arguments.shared_only else ("repeated", "shared", "ppo"):
            samples = make_samples(arguments.groups, group_size, model_config.vocab_size, share=name != "repeated")
            measured = measure(training, "gae" if name == "ppo" else "grpo", model_config, samples)
            precision = "float32" if autocast == "none" else autocast
            case = f"{name}_{precision}@{arguments.groups}x{group_size}"
            row: dict[str, object] = {
                "bench": "train",
                "case": case,
                "metric": "s_per_step",
                "value": round(measured.seconds, 3),
            }
            if before is not None:
                row |= {"baseline": before[0], "ratio": round(measured.seconds / before[1], 3)}
            before = (case, measured.seconds)
            row |= {"cpu_s": round(measured.cpu_s, 3), "forward_tokens": measured.forward_tokens}
            print(json.dumps(row), flush=True)


def measure(
    training: TrainingConfig, estimator: Literal["grpo", "gae"], model_config: LlamaConfig, samples: list[Sample]
) -> Measured:
    """One step, after a small one that allocates the optimizer's moments."""
    torch.manual_seed(0)
    actor = LlamaForCausalLM(model_config)
    critic = critic_from_actor(actor, seed=0) if estimator == "gae" else None
    config = Config(training=training, algorithm=AlgorithmConfig(estimator=estimator))
    trainer = Trainer(actor, config, critic=critic)
    trainer.step(samples[:2])
    cpu = time.process_time()
    report = trainer.step(samples)
    return Measured(report.seconds, time.process_time() - cpu, report.num_forward_tokens)


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
