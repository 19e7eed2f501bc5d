"""Policy-gradient steps on recorded tokens: how a batch is split over packs changes neither losses nor gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stenograph.algorithms.advantages import group_advantages
from stenograph.algorithms.losses import policy_loss
from stenograph.config import Config
from stenograph.training.batch import TokenArrays, num_trainable, sequence
from stenograph.training.forward import check_packable, target_logprobs
from stenograph.training.packing import Pack, pack
from stenograph.training.report import StepReport, Tally, has_gradient
from stenograph.training.weights import ModelWeights, save_model
from stenograph.types import Logprobs, Sample


@dataclasses.dataclass(frozen=True, slots=True)
class _Rollout:
    """The samples of one attempt, which share its reward; a rollout counts once in its group, however it branched."""

    samples: tuple[int, ...]  # indices into the step's samples
    group: str
    reward: float


class Trainer:
    """Trains a causal language model in place, on the device and in the precision that the config names.

    The model stays in eval mode, so that nothing random separates `old_logprobs` from `logprobs`. Random choices come
    from `training.seed` and `num_steps` alone; torch's and NumPy's global generators are neither read nor moved.
    """

    def __init__(self, model: PreTrainedModel, config: Config) -> None:
        check_packable(model)
        self._config = config
        self._training = config.training
        if self._training.num_threads is not None:
            torch.set_num_threads(self._training.num_threads)
        device = self._training.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.eval()
        torch.nn.Module.to(model, device)  # in place; transformers' own wrapper hides the types
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self._training.lr,
            betas=(0.9, 0.999),
            weight_decay=self._training.weight_decay,
            fused=True,  # one pass over the weights; the others make ten
        )
        self.num_steps = 0
        self.last_batch: list[TokenArrays] = []  # the last step's arrays, in the order of its samples

    @property
    def weights(self) -> ModelWeights:
        """The weights to publish, as they are now; valid until the next step."""
        return ModelWeights(self.model)

    def save_actor(self, path: Path) -> None:
        """Export the model for Hugging Face's `from_pretrained`. Raises CheckpointError; see `save_model`."""
        save_model(self.model, path)

    def old_logprobs(self, samples: Sequence[Sample]) -> list[Logprobs]:
        """Log-probabilities of each sample's trainable tokens under the weights as they are: [tokens], 0.0 elsewhere.

        They are the trainer's, in its own precision, never the engine's.
        """
        sequences = [sequence(sample) for sample in samples]
        self._fill_old_logprobs(sequences)
        return [arrays["old_logprobs"] for arrays in sequences]

    def step(self, samples: Sequence[Sample]) -> StepReport:
        """Train on whole groups of rollouts: `num_epochs` times over `num_minibatches`, one optimizer step each.

        The loss is a mean over all trainable tokens of a mini-batch, with one denominator for all of its packs.
        Samples whose advantage is 0 count in it, and are not computed. An optimizer step with nothing to learn from,
        or a gradient that is not finite, is skipped and said so in the report; weights and moments stay untouched.
        `old_logprobs` are frozen before the first update. With one epoch of one mini-batch they are the same forward's
        own log-probabilities, and no second forward is made.

        Raises ValueError for a sample without a reward, and for rollouts whose samples disagree.
        """
        started = time.perf_counter()
        rng = np.random.default_rng([self._training.seed, self.num_steps])
        rollouts = _rollouts(samples)
        sequences = [sequence(sample) for sample in samples]
        self._spread_advantages(rollouts, sequences, rng)

        num_minibatches = min(self._training.num_minibatches, max(1, len(rollouts)))
        single_pass = self._training.num_epochs == num_minibatches == 1
        if not single_pass:
            self._fill_old_logprobs([arrays for arrays in sequences if has_gradient(arrays)])

        tally = Tally()
        for _ in range(self._training.num_epochs):
            order = rng.permutation(len(rollouts))
            for minibatch in np.array_split(order, num_minibatches):
                chosen = sorted(n for rollout in minibatch for n in rollouts[rollout].samples)
                self._update([sequences[n] for n in chosen], tally, single_pass=single_pass)
        self.num_steps += 1
        self.last_batch = sequences
        return tally.report(
            sequences,
            num_rollouts=len(rollouts),
            reward_mean=float(np.mean([r.reward for r in rollouts])) if rollouts else 0.0,
            seconds=time.perf_counter() - started,
        )

    def _spread_advantages(
        self, rollouts: list[_Rollout], sequences: list[TokenArrays], rng: np.random.Generator
    ) -> None:
        rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
        if self._training.shuffle_rewards:
            rewards = rewards[torch.from_numpy(rng.permutation(len(rewards)))]
        groups = [rollout.group for rollout in rollouts]
        algorithm, lengths = self._config.algorithm, None
        if algorithm.estimator == "opo":  # a rollout without a trainable token weighs next to nothing
            counts = [num_trainable(sequences[n] for n in rollout.samples) for rollout in rollouts]
            lengths = torch.tensor(counts).clamp(min=1)
        advantages = group_advantages(rewards, groups, kind=algorithm.estimator, lengths=lengths, k=algorithm.k)
        for rollout, advantage in zip(rollouts, advantages.tolist(), strict=True):
            for n in rollout.samples:
                sequences[n]["advantages"][sequences[n]["loss_mask"]] = advantage

    def _update(self, minibatch: list[TokenArrays], tally: Tally, *, single_pass: bool) -> None:
        """One optimizer step on a mini-batch, its packs one after the other."""
        denominator = num_trainable(minibatch)
        if denominator == 0:
            tally.skipped.append("no trainable tokens")
            return
        computed = [arrays for arrays in minibatch if has_gradient(arrays)]
        if not computed:
            tally.skipped.append("every advantage is 0")
            return

        loss = torch.zeros((), device=self.model.device)
        for micro_batch, logprobs in self._forward(computed):
            if single_pass:
                micro_batch.scatter(logprobs.detach().cpu().numpy(), computed, "old_logprobs")
                old_logprobs = logprobs.detach()
            else:
                old_logprobs = self._signal(micro_batch, "old_logprobs")
            part, sums = policy_loss(
                logprobs,
                old_logprobs,
                self._signal(micro_batch, "advantages"),
                self._signal(micro_batch, "loss_mask"),
                torch.from_numpy(micro_batch.cu_seqlens).to(self.model.device),
                kind=self._config.algorithm.policy_loss,
                clip_low=self._config.algorithm.clip_low,
                clip_high=self._config.algorithm.clip_high,
                clip_dual=self._config.algorithm.clip_dual,
                denominator=denominator,
            )
            part.backward()
            loss += part.detach()
            tally.add_sums(sums)
            tally.num_forward_tokens += micro_batch.num_tokens
        tally.losses.append(loss.item())
        self._apply_gradients(tally)

    def _apply_gradients(self, tally: Tally) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        tally.grad_norms.append(norm.item())
        if norm.isfinite():
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._training.max_grad_norm, norm)
            self._optimizer.step()
            tally.num_updates += 1
        else:
            tally.skipped.append("gradient is not finite")
        self._optimizer.zero_grad()

    def _fill_old_logprobs(self, sequences: list[TokenArrays]) -> None:
        with torch.no_grad():
            for micro_batch, logprobs in self._forward(sequences):
                micro_batch.scatter(logprobs.cpu().numpy(), sequences, "old_logprobs")

    def _forward(self, sequences: list[TokenArrays]) -> Iterator[tuple[Pack, Tensor]]:
        """Packs of the sequences with their targets' log-probabilities."""
        for micro_batch in pack(sequences, self._training.pack_max_tokens):
            with self._autocast():
                logprobs = target_logprobs(self.model, micro_batch)
            yield micro_batch, logprobs

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._training.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.model.device.type, dtype=getattr(torch, self._training.autocast))

    def _signal(self, micro_batch: Pack, name: str) -> Tensor:
        return torch.from_numpy(micro_batch.signals[name]).to(self.model.device)


def _rollouts(samples: Sequence[Sample]) -> list[_Rollout]:
    """Samples by the attempt that they come from, in the order of first appearance.

    A sample without a rollout is one of its own session; a rollout without a group is a group of its own.
    """
    members: dict[str, list[int]] = {}
    for n, sample in enumerate(samples):
        members.setdefault(sample.rollout_id or sample.session, []).append(n)
    rollouts = []
    for name, indices in members.items():
        rewards = {samples[n].reward for n in indices}
        groups = {samples[n].group_id for n in indices}
        if len(rewards) > 1 or len(groups) > 1:
            raise ValueError(f"samples of rollout {name} disagree: rewards {rewards}, groups {groups}")
        (reward,), (group,) = rewards, groups
        if reward is None:
            raise ValueError(f"rollout {name} has no reward; judge it, or leave it out of the step")
        rollouts.append(_Rollout(tuple(indices), group or f"rollout {name}", reward))
    return rollouts
