"""One draw a row, with the log-probability of the very distribution that it was drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stenograph.errors import RequestError
from stenograph.types import Sampling

_NEUTRAL = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


def check_sampling(sampling: Sampling) -> None:
    """Raise RequestError for a field that `draw` would not honour."""
    for field, neutral in _NEUTRAL.items():
        if (value := getattr(sampling, field)) != neutral:
            raise RequestError(
                f"{field} = {value} is not supported by the local engine; leave it at {neutral}", param=field
            )


def draw(logits: Tensor, rows: Sequence[Sampling], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample a token a row: ids [rows] int64 and logprobs [rows] float32, in nats.

    logits: [rows, vocab] float32. A log-probability is that of the processed distribution: after temperature, and
    renormalised over what top-k and top-p keep. Temperature 0 takes the likeliest token, whose limit is log 1 = 0.
    """
    temperatures = [row.temperature or 1.0 for row in rows]
    if any(t != 1.0 for t in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    cut = [i for i, row in enumerate(rows) if row.temperature and (row.top_k or row.top_p < 1)]
    if cut:  # sorting a vocabulary is dear: only the rows that need it
        logits = logits.index_copy(
            0, torch.tensor(cut, device=logits.device), _truncate(logits[cut], [rows[i] for i in cut])
        )
    logprobs = logits.log_softmax(dim=-1)
    ids = _invert(logprobs.exp(), generator)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    if greedy := [i for i, row in enumerate(rows) if not row.temperature]:
        ids[greedy] = logits[greedy].argmax(dim=-1)
        chosen[greedy] = 0.0
    return ids, chosen


def _invert(probs: Tensor, generator: torch.Generator) -> Tensor:
    """[rows] int64 by inverse transform: one uniform number a row, where torch.multinomial takes one a token."""
    mass = probs.double().cumsum(dim=-1)  # in float32 the tail's rounding would shift what is drawn
    uniform = torch.rand(len(probs), 1, dtype=torch.float64, device=probs.device, generator=generator)
    ids = torch.searchsorted(mass, uniform * mass[:, -1:], right=True)  # right: never a token of probability 0
    return ids[:, 0].clamp_(max=probs.shape[1] - 1)


def _truncate(logits: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """[rows, vocab]: -inf outside the top k, then outside the smallest set of mass top_p; the first token stays."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[1]
    top_k = torch.tensor([row.top_k or vocab for row in rows], device=logits.device)[:, None]
    top_p = torch.tensor([row.top_p for row in rows], device=logits.device, dtype=torch.float64)[:, None]
    ordered = ordered.masked_fill(torch.arange(vocab, device=logits.device) >= top_k, -torch.inf)
    probs = ordered.softmax(dim=-1).double()
    before = probs.cumsum(dim=-1) - probs  # the mass of the likelier tokens
    outside = (before >= top_p) & (top_p < 1)
    outside[:, 0] = False
    return torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(outside, -torch.inf))
