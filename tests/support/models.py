"""A random model for tests, the weights it publishes, and what an engine should have said about a turn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from stenograph.types import Ids, Logprobs


def tiny_model(
    tokenizer_size: int = 307,
    seed: int = 0,
    *,
    context_length: int = 512,
    initializer_range: float = 0.2,
    dtype: torch.dtype = torch.float32,
) -> LlamaForCausalLM:
    """Llama of 2 layers, hidden 64, grouped queries, tied embeddings; torch's global generator is left as it was.

    The default range is large enough for distributions that differ from position to position; to learn, 0.02 is better.
    """
    config = LlamaConfig(
        vocab_size=tokenizer_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
        initializer_range=initializer_range,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    torch.nn.Module.to(model, dtype)
    return model


class Weights:
    """The WeightSource of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()


@torch.no_grad()
def fresh_logprobs(model: PreTrainedModel, prompt: Ids, output: Ids, temperature: float = 1.0) -> Logprobs:
    """log softmax(logits / temperature) of each output id, by one forward pass without a cache."""
    ids = torch.from_numpy(np.concatenate([prompt, output])).long()[None]
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


@torch.no_grad()
def perturb(model: PreTrainedModel, scale: float = 0.05, seed: int = 1) -> None:
    """Change every weight in place, as a training step would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
