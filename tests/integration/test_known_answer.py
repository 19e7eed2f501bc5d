"""PPO with a critic on a game whose answer is computed: it finds the best play, and the critic says what that is worth.

Discount and lambda are below 1, rollouts differ in length and some are cut: elsewhere most mistakes of a step hide.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from stenograph.config import Config
from stenograph.training.batch import TokenArrays, sequence
from stenograph.training.critic import ValueModel, critic_from_actor
from stenograph.training.forward import target_values
from stenograph.training.packing import pack
from stenograph.training.trainer import Trainer
from stenograph.types import Sample
from support import stairs
from support.samples import make_sample

STEPS = 35
ROLLOUTS = 256  # a step


def player(seed: int) -> LlamaForCausalLM:
    """One layer, hidden 32, which at first says everything as likely."""
    config = LlamaConfig(
        vocab_size=stairs.VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=16,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.1)
        model.model.embed_tokens.weight.mul_(5.0)  # the token that was told last counts for more than the mean of all
    return model


def learn(seed: int, kind: type[Trainer] = Trainer) -> Trainer:
    """A trainer after all its steps; the pull to the first policy keeps it from settling before it has tried."""
    model = player(seed)
    optimizer = {"num_minibatches": 4, "lr_schedule": "linear"}
    config = Config.model_validate(
        {
            "algorithm": {
                "estimator": "gae",
                "gamma": stairs.GAMMA,
                "lam": 0.95,
                "bootstrap": "value",
                "kl": {"placement": "loss", "beta": 0.08},
            },
            "critic": {**optimizer, "lr": 4e-3, "num_epochs": 2},
            "training": {**optimizer, "lr": 6e-3, "steps": STEPS, "seed": seed, "device": "cpu"},
        }
    )
    trainer = kind(model, config, critic=critic_from_actor(model, seed=seed), reference=copy.deepcopy(model))
    rng = np.random.default_rng(seed)
    for _ in range(STEPS):
        trainer.step(stairs.play(model, ROLLOUTS, rng, version=trainer.version))
    return trainer


@torch.no_grad()
def values(critic: ValueModel, histories: Sequence[tuple[int, ...]]) -> NDArray[np.float64]:
    """What the critic says of the states after these histories, by the trainer's passes: [histories]."""
    sequences = [sequence(make_sample([("context", ids), ("output", [0])])) for ids in histories]
    for micro_batch in pack(sequences, 4096):
        micro_batch.scatter(target_values(critic, micro_batch).values.numpy(), sequences, "values")
    return np.array([arrays["values"][-1] for arrays in sequences], np.float64)


def judged(trainer: Trainer) -> tuple[float, float]:
    """RMSE of the critic, in ranges of V*, and the return of the policy as it samples, in those of the best one.

    The error is over all states of the best policy's tree, each weighted with how often that policy comes there.
    """
    assert trainer.critic is not None
    visits, best_return = stairs.visits(stairs.best_policy)
    known = np.array([stairs.best(visit.state)[0] for visit in visits])
    errors = values(trainer.critic, [visit.ids for visit in visits]) - known
    weights = [visit.probability for visit in visits]
    rmse = float(np.sqrt(np.average(errors**2, weights=weights)))
    _, own_return = stairs.visits(stairs.policy_of(trainer.model))
    return rmse / np.ptp(known), own_return / best_return


@pytest.mark.parametrize("seed", range(5))
def test_critic_and_policy_come_to_the_known_answer(seed: int) -> None:
    rmse, own_return = judged(learn(seed))
    assert rmse <= 0.1
    assert own_return >= 0.95


class TargetsOfTheNextAction(Trainer):
    def _estimate(self, critic: ValueModel, samples: Sequence[Sample], sequences: list[TokenArrays]) -> None:
        super()._estimate(critic, samples, sequences)
        for arrays in sequences:
            mask = arrays["action_mask"]
            arrays["returns"][mask] = np.append(arrays["returns"][mask][1:], 0.0)


class RewardsOnObservations(Trainer):
    """A turn's reward stands on the token before the turn."""

    def _estimate(self, critic: ValueModel, samples: Sequence[Sample], sequences: list[TokenArrays]) -> None:
        for sample, arrays in zip(samples, sequences, strict=True):
            for turn in sample.turns:
                arrays["rewards"][turn.start - 1] = arrays["rewards"][turn.end - 1]
                arrays["rewards"][turn.end - 1] = 0.0
        super()._estimate(critic, samples, sequences)


class BootstrapsAtTerminals(Trainer):
    """Every rollout passes for one that was cut."""

    def _estimate(self, critic: ValueModel, samples: Sequence[Sample], sequences: list[TokenArrays]) -> None:
        super()._estimate(critic, [cut(sample) for sample in samples], sequences)


def cut(sample: Sample) -> Sample:
    *before, last = sample.turns
    return dataclasses.replace(sample, turns=(*before, dataclasses.replace(last, ended_by="length")))


@pytest.mark.parametrize("mutant", [TargetsOfTheNextAction, RewardsOnObservations, BootstrapsAtTerminals])
def test_a_mistake_misses_the_known_answer(mutant: type[Trainer]) -> None:
    rmse, own_return = judged(learn(0, mutant))
    assert rmse > 0.2 or own_return < 0.9
