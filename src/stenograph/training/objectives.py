"""What each model is trained for: the loss of one micro-batch, and the sums that its metrics are made of."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stenograph.algorithms.kl import kl_loss
from stenograph.algorithms.losses import policy_loss, value_loss
from stenograph.config_training import AlgorithmConfig
from stenograph.training import weighting
from stenograph.training.batch import TokenArrays, num_trainable
from stenograph.training.credit import kl_kind
from stenograph.training.critic import ValueModel
from stenograph.training.forward import target_logprobs, target_logprobs_and_entropy, target_values
from stenograph.training.learner import MicroBatch, Objective
from stenograph.training.passes import Passes
from stenograph.training.report import Tally


def policy_objective(
    model: PreTrainedModel, passes: Passes, config: AlgorithmConfig, tally: Tally, *, beta: float, is_scored: bool
) -> Objective:
    """The policy's loss, and beta times its divergence from the reference where that is in the loss.

    Where old_logprobs were not taken before (not `is_scored`), the model's only pass says them, and they are filled in.
    """

    def loss(batch: MicroBatch) -> Tensor:
        pack = batch.pack
        with passes.autocast():
            if batch.epoch == 0:
                logprobs, entropy = target_logprobs_and_entropy(model, pack)
            else:
                logprobs, entropy = target_logprobs(model, pack), None
        mask = passes.signal(pack, "loss_mask")
        old_logprobs = passes.signal(pack, "old_logprobs") if is_scored else logprobs.detach()
        if not is_scored and batch.is_own:
            pack.scatter(old_logprobs.cpu().numpy(), batch.sequences, "old_logprobs")
        total, sums = policy_loss(
            logprobs,
            old_logprobs,
            passes.signal(pack, "advantages"),
            mask,
            torch.from_numpy(pack.cu_seqlens).to(passes.device),
            kind=config.policy_loss,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            clip_dual=config.clip_dual,
            weights=passes.signal(pack, "weights") if weighting.is_weighted(config) else None,
            denominator=batch.denominator,
        )
        tally.add("actor", sums)
        if entropy is not None:
            tally.add("entropy", {"entropy": entropy[mask].double().sum(), "num_tokens": mask.sum()})
        if config.kl.placement == "loss":
            ref_logprobs = passes.signal(pack, "ref_logprobs")
            divergence, sums = kl_loss(
                logprobs, ref_logprobs, mask, kind=kl_kind(config.kl), denominator=batch.num_tokens
            )
            tally.add("kl", sums)
            total = total + beta * divergence
        return total

    return Objective(
        loss,
        denominator=lambda sequences: weighting.denominator(sequences, config),
        is_computed=lambda arrays: can_move_actor(arrays, config) and not _is_rejected(arrays, config),
    )


def value_objective(critic: ValueModel, passes: Passes, clip: float | None, tally: Tally) -> Objective:
    """The critic's squared error over all trainable tokens, whatever the policy's loss is divided by."""

    def loss(batch: MicroBatch) -> Tensor:
        pack = batch.pack
        with passes.autocast():
            output = target_values(critic, pack)
        total, sums = value_loss(
            output.values,
            passes.signal(pack, "returns"),
            passes.signal(pack, "loss_mask"),
            old_values=None if clip is None else passes.signal(pack, "values"),
            clip=clip,
            denominator=batch.denominator,
        )
        tally.add("critic", sums)
        if output.balancing_loss is not None:
            total = total + batch.share * output.balancing_loss
        return total

    return Objective(loss, denominator=num_trainable, is_computed=lambda arrays: bool(arrays["loss_mask"].any()))


def can_move_actor(arrays: TokenArrays, config: AlgorithmConfig) -> bool:
    """Whether a sequence has a gradient: a token whose advantage is exactly 0 has none, but for KL in the loss."""
    advantages = arrays["advantages"][arrays["loss_mask"]]
    if config.has_critic or config.kl.placement == "loss":  # their advantages are not known before the first pass
        return len(advantages) > 0
    return bool((advantages != 0).any())


def _is_rejected(arrays: TokenArrays, config: AlgorithmConfig) -> bool:
    """Whether no token's loss weighs anything; an update on such alone would go on by its momentum."""
    return config.kl.placement != "loss" and not arrays["weights"][arrays["loss_mask"]].any()
