"""One training step on recorded tokens: how a batch is split over packs and ranks changes neither losses nor gradients.

rewards -> old and reference log-probabilities -> values -> advantages -> the critic's updates -> the actor's updates
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from transformers import PreTrainedModel

from stenograph.algorithms.kl import adapted_beta
from stenograph.config import Config
from stenograph.errors import ConfigError
from stenograph.training import credit, measuring, weighting
from stenograph.training.batch import TokenArrays, num_trainable, sequence
from stenograph.training.credit import Attempt
from stenograph.training.critic import ValueModel
from stenograph.training.forward import check_packable
from stenograph.training.learner import Learner, Learnt
from stenograph.training.measuring import Metrics
from stenograph.training.objectives import can_move_actor, policy_objective, value_objective
from stenograph.training.passes import Passes
from stenograph.training.phases import Phases, Place, mover
from stenograph.training.ranks import Ranks
from stenograph.training.report import StepReport, Tally
from stenograph.training.updates import Updates
from stenograph.training.weights import ModelWeights, save_model
from stenograph.types import Logprobs, Sample


class Trainer:
    """Trains a causal language model in place, and the critic with it, on the device and in the precision of `config`.

    The models stay in eval mode, so that nothing random separates `old_logprobs` from `logprobs`. Random choices come
    from `training.seed` and `num_steps` alone; torch's and NumPy's global generators are neither read nor moved.

    With a `process_group`, each of its ranks has a trainer of equal models, and gives every step the same samples.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: Config,
        *,
        critic: ValueModel | None = None,
        reference: PreTrainedModel | None = None,
        process_group: dist.ProcessGroup | None = None,
        place: Place | None = None,
    ) -> None:
        """`place` moves models and moments for `training.offload`; default: between the device and main memory."""
        check_packable(model)
        if critic is not None:
            check_packable(critic, "critic.path")
        _check_models(config, critic, reference)
        self._config = config
        self._algorithm = config.algorithm
        self._training = config.training
        if self._training.num_threads is not None:
            torch.set_num_threads(self._training.num_threads)
        device = _device(self._training.device)
        self.model = model.eval()
        self.critic = critic
        self._reference = reference
        self._passes = Passes(config.training, device, Ranks(process_group))
        num_steps = config.training.steps
        # Where the warm-up may end sooner, any step may be the actor's: its schedule must last as long as the run.
        warmup = 0 if config.critic.warmup_explained_variance is not None else config.critic.warmup_steps
        self._actor = Learner("actor", model, config.training, max(1, num_steps - warmup), self._passes)
        self._critic: Learner | None = None
        if critic is not None:
            self._critic = Learner("critic", critic.eval(), config.critic, num_steps, self._passes)
        if reference is not None:
            reference.eval().requires_grad_(False)
        self.phases = self._begin_phases(place)
        self.num_steps = 0
        self.version = 0  # of the policy: steps that changed the actor
        self.beta = self._algorithm.kl.beta
        self._is_critic_warm = False
        self.last_batch: list[TokenArrays] = []  # the last step's arrays, in the order of its samples

    @property
    def weights(self) -> ModelWeights:
        """The weights to publish, as they are now; valid until the next step."""
        return ModelWeights(self.model)

    @property
    def updates(self) -> dict[str, Updates]:
        """The optimizers, by the names of their models."""
        critic = {} if self._critic is None else {"critic": self._critic.updates}
        return {"actor": self._actor.updates} | critic

    @property
    def is_warmup(self) -> bool:
        """Whether the next step leaves the actor as it is, and trains the critic alone."""
        return (
            self.critic is not None and not self._is_critic_warm and self.num_steps < self._config.critic.warmup_steps
        )

    def save_actor(self, path: Path) -> None:
        """Export the model for Hugging Face's `from_pretrained`. Raises CheckpointError; see `save_model`."""
        save_model(self.model, path)

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold beside models and optimizers, for JSON."""
        return {
            "num_steps": self.num_steps,
            "version": self.version,
            "beta": self.beta,
            "is_critic_warm": self._is_critic_warm,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; what it does not know stays as it is, with a warning."""
        own = self.state()
        for name in own.keys() - state.keys():
            warnings.warn(f"the checkpoint says nothing of {name}; it goes on from {own[name]}", stacklevel=2)
        known = own | dict(state)
        self.num_steps, self.version = known["num_steps"], known["version"]
        self._is_critic_warm = known["is_critic_warm"]
        if self._algorithm.kl.target is not None:  # a fixed one is the configuration's
            self.beta = known["beta"]

    def old_logprobs(self, samples: Sequence[Sample]) -> list[Logprobs]:
        """Log-probabilities of each sample's trainable tokens under the weights as they are: [tokens], 0.0 elsewhere.

        They are the trainer's, in its own precision, never the engine's.
        """
        sequences = [sequence(sample) for sample in samples]
        self._passes.fill_logprobs(self.model, sequences, "old_logprobs")
        return [arrays["old_logprobs"] for arrays in sequences]

    def step(self, samples: Sequence[Sample]) -> StepReport:
        """Train on whole groups of rollouts: each model `num_epochs` times over `num_minibatches`, one update each.

        `old_logprobs` and `values` are frozen before the first update. A loss has one denominator for all packs and
        ranks of a mini-batch. Samples whose advantage is 0, or whose tokens are all rejected, count in it, and are not
        computed. An update with nothing to learn from, or whose gradient is not finite or too large, is skipped and
        said so in the report; weights and moments stay untouched.

        Raises ValueError for a sample whose reward, or a turn's, is missing or not finite, and for rollouts whose
        samples disagree.
        """
        started = time.perf_counter()
        is_warmup = self.is_warmup
        self.phases.enter("rollout")
        attempts = credit.attempts_of(samples)
        sequences = [sequence(sample) for sample in samples]
        rewards = torch.tensor([attempt.reward for attempt in attempts], dtype=torch.float64)
        if self._training.shuffle_rewards:
            rewards = rewards[torch.from_numpy(self._rng("rewards").permutation(len(rewards)))]

        if self._algorithm.has_critic:
            credit.place_rewards(attempts, rewards, samples, sequences, self._algorithm)
            if not self._training.shuffle_rewards:  # those of turns are no other rollout's: they would still teach
                credit.place_turn_rewards(samples, sequences)
        else:
            credit.spread_advantages(attempts, rewards, samples, sequences, self._algorithm)
        is_scored = self._score(sequences, len(attempts), is_warmup=is_warmup)
        kl_reward = self._penalise(sequences, is_scored=is_scored)
        if self.critic is not None:
            self._estimate(self.critic, samples, sequences)
        corrected: Metrics = dict.fromkeys(weighting.METRICS)
        if is_scored:
            corrected = weighting.correct(sequences, self._algorithm.off_policy, self.version)
        weighting.reduce(sequences, self._algorithm)

        tally = Tally()
        of_critic = self._train_critic(attempts, sequences, tally)
        of_actor = Learnt() if is_warmup else self._train_actor(attempts, sequences, tally, is_scored=is_scored)

        computed = [arrays for arrays in sequences if can_move_actor(arrays, self._algorithm)]
        metrics = {
            **measuring.samples(attempts, samples, sequences, self.version),
            **measuring.policies(computed, has_old=is_scored or not is_warmup, has_ref=self._reference is not None),
            **measuring.values(sequences, has_critic=self.critic is not None),
            **measuring.updates(self.updates, {"actor": of_actor.grad_norms, "critic": of_critic.grad_norms}),
            **tally.metrics(self._passes.ranks),
            **corrected,
            "kl_reward": kl_reward,
            "kl_beta": None if self._reference is None else self.beta,
        }
        self._advance(metrics, len(attempts), is_warmup=is_warmup, applied=of_actor.num_updates > 0)
        self.last_batch = sequences
        return StepReport(
            applied=of_actor.num_updates > 0,
            is_warmup=is_warmup,
            num_updates=of_actor.num_updates,
            num_critic_updates=of_critic.num_updates,
            skipped=(*of_critic.skipped, *of_actor.skipped),
            num_rollouts=len(attempts),
            num_tokens=num_trainable(sequences),
            num_computed_tokens=num_trainable(computed),
            num_forward_tokens=tally.num_forward_tokens,
            reward_mean=float(rewards.mean()) if attempts else 0.0,
            reward_by_task=measuring.reward_by_task(attempts),
            explained_variance_by_turn=measuring.explained_variance_by_turn(sequences) if self.critic else [],
            loss_denominator=self._algorithm.reduction,
            seconds=time.perf_counter() - started,
            metrics=metrics,
        )

    def _score(self, sequences: list[TokenArrays], num_attempts: int, *, is_warmup: bool) -> bool:
        """Take the reference's log-probabilities, and the actor's where more is asked than its only pass will say.

        Returns whether the actor's were taken.
        """
        kl, weighs = self._algorithm.kl, self._algorithm.off_policy.level != "none"
        takes_old = not is_warmup and (
            not self._actor.is_single_pass(num_attempts)
            or weighs
            or (kl.placement == "reward" and kl.behaviour == "actor")
        )
        if kl.placement == "reward":  # the engine's will do only where they are of what was sampled from
            takes_old |= any((arrays["loss_mask"] & ~arrays["comparable"]).any() for arrays in sequences)
        takes_reference = kl.placement == "reward" or (kl.placement == "loss" and not is_warmup)
        # Whether a token is rejected is asked of those without a gradient too.
        chosen = [arrays for arrays in sequences if weighs or can_move_actor(arrays, self._algorithm)]
        if takes_old or takes_reference:
            self.phases.enter("score")
        if takes_old:
            self._passes.fill_logprobs(self.model, chosen, "old_logprobs")
        if takes_reference:
            assert self._reference is not None
            self._passes.fill_logprobs(self._reference, chosen, "ref_logprobs")
        return takes_old

    def _penalise(self, sequences: list[TokenArrays], *, is_scored: bool) -> float | None:
        """Put the divergence from the reference into the rewards; returns its mean, in nats a token."""
        kl = self._algorithm.kl
        if kl.placement != "reward":
            return None
        is_sampled = kl.behaviour == "engine" or not is_scored or self.is_warmup
        return credit.penalise(sequences, kl, beta=self.beta, is_sampled=is_sampled)

    def _estimate(self, critic: ValueModel, samples: Sequence[Sample], sequences: list[TokenArrays]) -> None:
        """Values, advantages and returns of every action."""
        self.phases.enter("value")
        at_ends = self._passes.fill_values(critic, sequences)
        truncated = torch.tensor([sample.truncated for sample in samples], dtype=torch.bool)
        credit.estimate_advantages(sequences, at_ends.where(truncated, 0.0), self._algorithm)

    def _train_critic(self, attempts: Sequence[Attempt], sequences: Sequence[TokenArrays], tally: Tally) -> Learnt:
        if self.critic is None or self._critic is None:
            return Learnt()
        self.phases.enter("train_critic")
        objective = value_objective(self.critic, self._passes, self._config.critic.value_clip, tally)
        return self._critic.learn(attempts, sequences, objective, self._rng("critic"), tally)

    def _train_actor(
        self, attempts: Sequence[Attempt], sequences: Sequence[TokenArrays], tally: Tally, *, is_scored: bool
    ) -> Learnt:
        self.phases.enter("train_actor")
        objective = policy_objective(
            self.model, self._passes, self._algorithm, tally, beta=self.beta, is_scored=is_scored
        )
        learnt = self._actor.learn(attempts, sequences, objective, self._rng("actor"), tally)
        if not is_scored:
            self._passes.ranks.gather(sequences, "old_logprobs")
        return learnt

    def _advance(
        self, metrics: Mapping[str, float | None], num_rollouts: int, *, is_warmup: bool, applied: bool
    ) -> None:
        """What the next step goes on from."""
        self.num_steps += 1
        self.version += applied
        kl = self._algorithm.kl
        measured = metrics["kl_reward"] if kl.placement == "reward" else metrics["kl_loss"]
        if kl.target is not None and measured is not None and not is_warmup:  # there the actor is the reference still
            self.beta = adapted_beta(
                self.beta, measured, target_kl=kl.target, num_rollouts=num_rollouts, horizon=kl.horizon
            )
        threshold, explained = self._config.critic.warmup_explained_variance, metrics["explained_variance"]
        if threshold is not None and explained is not None and explained >= threshold:
            self._is_critic_warm = True

    def _rng(self, choice: str) -> np.random.Generator:
        """For one kind of random choice in this step."""
        return np.random.default_rng([self._training.seed, self.num_steps, _CHOICES.index(choice)])

    def _begin_phases(self, place: Place | None) -> Phases:
        models = {"actor": self.model, "critic": self.critic, "reference": self._reference}
        modules = {name: model for name, model in models.items() if model is not None}
        optimizers = [f"{name}_optimizer" for name in self.updates]
        offload, engine = self._training.offload, self._config.engine
        if not offload:
            for module in modules.values():
                torch.nn.Module.to(module, self._passes.device)  # in place; transformers' own wrapper hides the types
        return Phases(
            place or mover(self._passes.device, modules, self.updates),
            offload=offload,
            parts=[*modules, *optimizers],
            engine_shares_weights=engine.kind == "local" and engine.weights == "shared",
        )


_CHOICES = ("rewards", "actor", "critic")


def _device(name: str | None) -> torch.device:
    """Raises ConfigError for one that cannot be used."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as e:  # the latter of a torch that is built without it
        reason = str(e).partition("\n")[0]
        raise ConfigError(f"training.device: {name!r} cannot be used ({reason}); leave it out, or give another") from e
    return device


def _check_models(config: Config, critic: ValueModel | None, reference: PreTrainedModel | None) -> None:
    if config.algorithm.has_critic != (critic is not None):
        raise ValueError(f"estimator {config.algorithm.estimator!r} with critic {critic!r}: give both, or neither")
    if (config.algorithm.kl.placement != "none") != (reference is not None):
        raise ValueError(f"KL in {config.algorithm.kl.placement!r} with reference {reference!r}: give both, or neither")
