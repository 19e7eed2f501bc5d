"""Log-probabilities of a pack's targets: equal to those of its sequences computed one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stenograph.errors import ConfigError
from stenograph.training.packing import Pack


def check_packable(model: PreTrainedModel) -> None:
    """Raise ConfigError for layers that would not honour a pack's attention mask."""
    window = "sliding_attention" if getattr(model.config, "sliding_window", None) else "full_attention"
    layers = set(getattr(model.config, "layer_types", None) or [window])
    if layers != {"full_attention"}:
        raise ConfigError(
            f"model.path: {model.config.model_type} has layers of types {sorted(layers)}, and packed training needs "
            "full attention in all of them; choose such a model"
        )


def target_logprobs(model: PreTrainedModel, pack: Pack) -> Tensor:
    """The log-probability of each target under `model`: [targets] float32, in nats, after temperature.

    Only rows that predict a target go through the language-model head, and no row goes twice.
    """
    device = model.device
    rows = torch.from_numpy(pack.rows).to(device)
    with _sdpa(model):
        output = model(
            input_ids=torch.from_numpy(pack.ids).to(device)[None],
            position_ids=torch.from_numpy(pack.positions).to(device)[None],
            attention_mask=_attention_mask(torch.from_numpy(pack.ends).to(device)),
            logits_to_keep=rows,
            use_cache=False,
        )
    logits = output.logits[0].float()  # [rows, vocab]
    if (pack.row_temperature != 1).any():
        logits = logits / torch.from_numpy(pack.row_temperature).to(device)[:, None]

    # index_select's gradient adds up in a fixed order; that of indexing does not, where an index is repeated.
    row = torch.from_numpy(pack.row_of_target).to(device)
    target = torch.from_numpy(pack.signals["ids"]).to(device).long()
    chosen = logits.reshape(-1).index_select(0, row * logits.shape[1] + target)
    return chosen - logits.logsumexp(dim=-1).index_select(0, row)


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
