"""Attention of a ragged batch, sequence by sequence: the same numbers as one masked product, at the sum of their sizes.

transformers hands all sequences of a batch to `sdpa` as one, under a mask of [queries, keys of all sequences]; on CPU
that product grows with the square of the concurrency.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

RAGGED = "stenograph_ragged"


def install() -> None:
    """Make RAGGED known to transformers; idempotent."""
    AttentionInterface.register(RAGGED, ragged_attention)
    AttentionMaskInterface.register(RAGGED, _no_mask)


def ragged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, queries, dim]
    key: Tensor,  # [1, kv heads, keys, dim]
    value: Tensor,  # [1, kv heads, keys, dim]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor,  # [sequences + 1]
    cu_seq_lens_k: Tensor,  # [sequences + 1]
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, whose queries are its last keys: [1, queries, heads, dim]."""
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
    output = query.new_empty(1, query.shape[2], heads, dim)
    starts_q, starts_k = cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist()
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        q, k, v = query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1]
        if q1 - q0 == 1:  # the heads of a group attend to the same keys: let them be its queries
            attended = scaled_dot_product_attention(q.reshape(1, kv_heads, -1, dim), k, v, scale=scaling)
            output[:, q0] = attended.reshape(1, heads, dim)
        else:
            k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
            mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=q.device).tril_(k1 - k0 - (q1 - q0))
            attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
            output[:, q0:q1] = attended.transpose(1, 2)
    return output, None


def _no_mask(*_: Any, **__: Any) -> None:
    """`ragged_attention` needs none."""
