"""What models say of a pack's targets: equal to what they say of its sequences, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stenograph.errors import ConfigError
from stenograph.training.critic import ValueModel
from stenograph.training.packing import Pack

_ENTROPY_ROWS = 512  # bounds the second copy of the logits


def check_packable(model: PreTrainedModel, setting: str = "model.path") -> None:
    """Raise ConfigError for layers that would not honour a pack's attention mask; `setting` chose the model."""
    window = "sliding_attention" if getattr(model.config, "sliding_window", None) else "full_attention"
    layers = set(getattr(model.config, "layer_types", None) or [window])
    if layers != {"full_attention"}:
        raise ConfigError(
            f"{setting}: {model.config.model_type} has layers of types {sorted(layers)}, and packed training needs "
            "full attention in all of them; choose such a model"
        )


def target_logprobs(model: PreTrainedModel, pack: Pack) -> Tensor:
    """The log-probability of each target under `model`: [targets] float32, in nats, after temperature."""
    return _chosen(_row_logits(model, pack), pack)


def target_logprobs_and_entropy(model: PreTrainedModel, pack: Pack) -> tuple[Tensor, Tensor]:
    """`target_logprobs`, and the entropy of the distribution that each target was drawn from, after temperature.

    Both are [targets] float32, in nats; the entropy is exact, over the whole vocabulary, and has no gradient.
    """
    logits = _row_logits(model, pack)
    with torch.no_grad():
        parts = [torch.special.entr(part.softmax(-1)).sum(-1) for part in logits.split(_ENTROPY_ROWS)]
        entropy = torch.cat(parts).index_select(0, torch.from_numpy(pack.row_of_target).to(logits.device))
    return _chosen(logits, pack), entropy


class PackValues(NamedTuple):
    """What a critic says of a pack, whatever the temperature."""

    values: Tensor  # [targets] float32: of the state in which each target was chosen
    at_ends: Tensor  # [sequences] float32: of the state after each one's last token
    balancing_loss: Tensor | None  # weighted, of the critic's experts over all the pack's tokens; see `ValueOutput`


def target_values(critic: ValueModel, pack: Pack) -> PackValues:
    """The values of a pack's states under `critic`."""
    with _sdpa(critic):
        output = critic(**_inputs(pack, critic.device))
    values = output.values[0]
    chosen = torch.from_numpy(pack.rows[pack.row_of_target]).to(critic.device)
    at_ends = torch.from_numpy(pack.ends_of_sequences).to(critic.device)
    return PackValues(values.index_select(0, chosen), values.index_select(0, at_ends), output.balancing_loss)


def _row_logits(model: PreTrainedModel, pack: Pack) -> Tensor:
    """[rows, vocab] float32, after temperature. Only rows go through the language-model head, and no row goes twice."""
    device = model.device
    # A model of experts would make a balancing loss of them, which nobody reads, and for which our mask is no mask.
    routers = {"output_router_logits": False} if getattr(model.config, "output_router_logits", False) else {}
    with _sdpa(model):
        kept = torch.from_numpy(pack.rows).to(device)
        output = model(**_inputs(pack, device), logits_to_keep=kept, use_cache=False, **routers)
    logits = output.logits[0].float()
    if (pack.row_temperature != 1).any():
        logits = logits / torch.from_numpy(pack.row_temperature).to(device)[:, None]
    return logits


def _chosen(logits: Tensor, pack: Pack) -> Tensor:
    # index_select's gradient adds up in a fixed order; that of indexing does not, where an index is repeated.
    row = torch.from_numpy(pack.row_of_target).to(logits.device)
    target = torch.from_numpy(pack.signals["ids"]).to(logits.device).long()
    chosen = logits.reshape(-1).index_select(0, row * logits.shape[1] + target)
    return chosen - logits.logsumexp(dim=-1).index_select(0, row)


def _inputs(pack: Pack, device: torch.device) -> dict[str, Tensor]:
    """What a model is given: the pack as a batch of one."""
    return {
        "input_ids": torch.from_numpy(pack.ids).to(device)[None],
        "position_ids": torch.from_numpy(pack.positions).to(device)[None],
        "attention_mask": _attention_mask(torch.from_numpy(pack.ends).to(device)),
    }


def _attention_mask(ends: Tensor) -> Tensor:
    """[1, 1, tokens, tokens] bool: token i sees those up to itself whose subtree it stands in."""
    i = torch.arange(len(ends), device=ends.device)
    return ((i[None, :] <= i[:, None]) & (i[:, None] < ends[None, :]))[None, None]


@contextmanager
def _sdpa(model: PreTrainedModel) -> Iterator[None]:
    """Attend with an explicit mask, whatever attention an engine that shares the module has set."""
    before = model.config._attn_implementation
    model.config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        model.config._attn_implementation = before
