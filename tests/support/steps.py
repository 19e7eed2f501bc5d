"""Whole training steps of tiny models, on rollouts with everything in them that a step has to tell apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from transformers import PreTrainedModel

from stenograph.config import AlgorithmConfig, Config, CriticConfig, TrainingConfig
from stenograph.training.critic import ValueModel, critic_from_actor
from stenograph.training.report import StepReport
from stenograph.training.trainer import Trainer
from stenograph.types import Sample
from support.models import fresh_logprobs, perturb, tiny_model
from support.samples import VOCAB, make_sample

_RANGE = 0.1  # of the weights: log-probabilities near -6, of which float32 has the seventh digit


def actor_and_reference(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedModel]:
    """What every trainer begins with; they differ a little."""
    actor, reference = (tiny_model(dtype=dtype, initializer_range=_RANGE) for _ in range(2))
    perturb(reference, 0.01)
    return actor, reference


def make_trainer(
    algorithm: Mapping[str, Any],
    critic: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    process_group: dist.ProcessGroup | None = None,
    **training: Any,
) -> Trainer:
    """A trainer with the models that `algorithm` asks for; the critic's head is drawn from seed 1."""
    values = {"lr": 1e-3, "device": "cpu", **training}
    chosen = AlgorithmConfig(**algorithm)
    actor, reference = actor_and_reference(dtype)
    return Trainer(
        actor,
        Config(training=TrainingConfig(**values), algorithm=chosen, critic=CriticConfig(**critic or {})),
        critic=critic_from_actor(actor, seed=1) if chosen.has_critic else None,
        reference=reference if chosen.kl.placement != "none" else None,
        process_group=process_group,
    )


def varied_rollouts(seed: int = 0, *, num_groups: int = 2) -> list[Sample]:
    """Groups of three rollouts, with lengths of their own: at temperature 0.7 with raw log-probabilities, with a second
    branch that goes on from an earlier turn, and cut short after a turn with a reward; each has a masked action."""
    rng = np.random.default_rng(seed)
    model, _ = actor_and_reference()

    def ids(low: int, high: int) -> list[int]:
        return rng.integers(0, VOCAB, rng.integers(low, high + 1)).tolist()

    samples = []
    for group in range(num_groups):
        prompt = ids(5, 12)
        for kind in range(3):
            first, reward = ids(2, 9), float(rng.random())
            for branch in range(2 if kind == 1 else 1):
                sample = make_sample(
                    [
                        ("context", prompt),
                        ("output", first),
                        ("context", ids(1, 5)),
                        ("output", ids(2, 9)),
                        ("context", ids(0, 3)),
                    ],
                    rollout=f"{group}-{kind}",
                    group=f"g{group}",
                    reward=reward,
                    branch=branch,
                    temperature=0.7 if kind == 0 else 1.0,
                    version=3 + kind,
                )
                samples.append(_as_sampled(model, _varied(sample, kind, rng), rng))
    return samples


def _varied(sample: Sample, kind: int, rng: np.random.Generator) -> Sample:
    mask, (first, last) = sample.loss_mask.copy(), sample.turns
    mask[rng.choice(np.arange(last.start, last.end))] = False
    if sample.branch:
        mask[first.start : first.end] = False  # the other branch trains it
    if kind == 0:
        first, last = (dataclasses.replace(turn, logprobs_mode="raw") for turn in (first, last))
    if kind == 2:
        first, last = dataclasses.replace(first, reward=0.3), dataclasses.replace(last, ended_by="length")
    return dataclasses.replace(sample, loss_mask=mask, turns=(first, last), task_id=f"task {kind}")


def _as_sampled(model: PreTrainedModel, sample: Sample, rng: np.random.Generator) -> Sample:
    """With the log-probabilities of an engine that differs a little; of what is masked they are no numbers."""
    logprobs = np.zeros(len(sample.ids), np.float32)
    logprobs[1:] = fresh_logprobs(model, sample.ids[:1], sample.ids[1:])
    logprobs += rng.normal(0, 0.2, len(logprobs)).astype(np.float32)
    logprobs[sample.versions < 0] = 0.0
    logprobs[(sample.versions >= 0) & ~sample.loss_mask] = np.nan
    return dataclasses.replace(sample, rollout_logprobs=logprobs)


def give_values(critic: ValueModel, value_of: Callable[[Tensor], Tensor]) -> None:
    """Let `critic` say what `value_of` makes of the ids, [batch, tokens] both; its own values have no say."""

    def replaced(_module: Any, _args: Any, inputs: dict[str, Tensor], output: Any) -> Any:
        return output._replace(values=output.values * 0 + value_of(inputs["input_ids"]))

    critic.register_forward_hook(replaced, with_kwargs=True)


@contextmanager
def without_passes(model: torch.nn.Module) -> Iterator[None]:
    """Let every forward pass of `model` fail."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a forward pass of a model that is not asked")

    hook = model.register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def numbers(report: StepReport) -> dict[str, float]:
    """Every number that there is in a report, and that no split of the batch may change."""
    named: dict[str, Any] = {}
    for name, value in report.row().items():
        if isinstance(value, Mapping):
            named |= {f"{name}/{key}": part for key, part in value.items()}
        elif isinstance(value, list):
            named |= {f"{name}/{n}": part for n, part in enumerate(value)}
        else:
            named[name] = value
    split = ("seconds", "num_forward_tokens")
    return {name: float(x) for name, x in named.items() if isinstance(x, int | float) and name not in split}


def arrays(trainer: Trainer, name: str) -> list[list[float]]:
    """A signal of the last step, by sample."""
    return [sequence[name].tolist() for sequence in trainer.last_batch]


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def moments_of(trainer: Trainer) -> dict[str, np.ndarray]:
    """The first moments of each model, end to end."""
    return {
        name: torch.cat([state["exp_avg"].reshape(-1) for state in updates.optimizer.state.values()]).numpy()
        for name, updates in trainer.updates.items()
        if updates.optimizer.state
    }
