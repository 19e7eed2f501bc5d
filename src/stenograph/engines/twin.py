"""A second module over a model's weights, the same tensors or copies, with its own config, mode and attention."""

from __future__ import annotations

import copy
from itertools import chain

import torch
from torch import nn
from transformers import PreTrainedModel

from stenograph.engines.base import WeightSource
from stenograph.errors import EngineError


def sharing_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A module with the very parameters and buffers of `model`, but its own config, mode and attention."""
    same = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, same).eval()


def copying_twin(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A module with parameters of its own in `dtype`, tied where the model's are; buffers keep their dtype.

    Casting buffers too, as `model.to(dtype)` does, would round the rotary frequencies.
    """
    own: dict[int, torch.Tensor] = {
        id(p): nn.Parameter(p.detach().to(dtype, copy=True), requires_grad=False) for p in model.parameters()
    }
    own |= {id(b): b.detach().clone() for b in model.buffers()}
    return copy.deepcopy(model, own).eval()


@torch.no_grad()
def copy_weights(source: WeightSource, model: PreTrainedModel) -> None:
    """Fill `model` from `source`, cast to its dtype. Raises EngineError for a name too many or too few."""
    missing = {name for name, _ in model.named_parameters()}  # of tied ones, one name
    tensors = model.state_dict(keep_vars=True)  # of tied ones, each name
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, tensor in source.tensors():
        if name not in tensors:
            raise EngineError(f"the weights have a tensor {name!r}, the engine's model has none of that name")
        tensors[name].copy_(tensor)
        missing.discard(names.get(id(tensors[name]), name))
    if missing:
        raise EngineError(f"the weights lack {len(missing)} of the engine's tensors, such as {min(missing)!r}")
