"""Milliseconds of `gae` beside four usual ways to compute it, the best of them its baseline: one JSON row a case.

All go from packed float32 tokens and their action mask to advantages and returns, by float64, which `gae` needs where
values are large beside advantages. The four compact the actions first, and have it easy: sequences of equal length, one
gamma and lambda, nothing checked. `--quick`: fewer repetitions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import pad

from stenograph.algorithms.gae import gae

GAMMA, LAM = 0.99, 0.95
DECAY = GAMMA * LAM
SHAPES = ((32_768, 1), (32_768, 8), (32_768, 64), (131_072, 16))  # tokens, sequences
NUM_CONTEXT, NUM_OUTPUT = 96, 160  # tokens of a turn
CHUNK = 128
TOLERANCE = 1e-5  # of max(1, max|A|)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Packed sequences."""

    rewards: Tensor  # [tokens] float32
    values: Tensor  # [tokens] float32
    action_mask: Tensor  # [tokens] bool
    cu_seqlens: Tensor  # [sequences + 1] int32


@dataclass(frozen=True, slots=True)
class Actions:
    """Their actions alone, one after the other."""

    rewards: Tensor  # [actions] float64
    values: Tensor  # [actions] float64
    bounds: Tensor  # [sequences + 1] int64


Method = Callable[[Actions], Tensor]  # advantages: [actions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    # Has the allocator keep what is freed, as it does in a process that trains: else page faults would be measured.
    torch.empty(7 * 2**20)

    for num_tokens, num_sequences in SHAPES:
        tokens = make_tokens(num_tokens, num_sequences, arguments.seed)
        check(tokens)
        taken = measure(tokens, repetitions=5 if arguments.quick else 20)
        report(f"{num_tokens}x{num_sequences}", taken, arguments.threads)


def make_tokens(num_tokens: int, num_sequences: int, seed: int) -> Tokens:
    rewards, values = torch.randn(2, num_tokens, generator=torch.Generator().manual_seed(seed))
    action_mask = torch.arange(num_tokens) % (NUM_CONTEXT + NUM_OUTPUT) >= NUM_CONTEXT
    cu_seqlens = torch.arange(num_sequences + 1, dtype=torch.int32) * (num_tokens // num_sequences)
    return Tokens(rewards.where(action_mask, 0.0), values, action_mask, cu_seqlens)


def report(case: str, taken: dict[str, float], threads: int) -> None:
    best = min((name for name in taken if name != "gae"), key=taken.__getitem__)
    for name, ms in taken.items():
        row: dict[str, object] = {"bench": "gae", "case": f"{name}@{case}", "metric": "ms", "value": round(ms, 3)}
        if name == "gae":
            row |= {"baseline": f"{best}@{case}", "ratio": round(ms / taken[best], 3)}
        print(json.dumps(row | {"threads": threads}), flush=True)


def measure(tokens: Tokens, repetitions: int) -> dict[str, float]:
    """The median of each in ms.

    They take turns, so that a busy moment of the machine meets all of them; each runs twice and the second time counts,
    so that none pays for what the one before did to the caches.
    """
    taken: dict[str, list[float]] = {name: [] for name in (*METHODS, "gae")}
    for _ in range(repetitions):
        for name, times in taken.items():
            run(name, tokens)
            started = time.perf_counter()
            run(name, tokens)
            times.append(1000 * (time.perf_counter() - started))
    return {name: median(times) for name, times in taken.items()}


def run(name: str, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Advantages and returns: [tokens] each, 0 on observations."""
    if name == "gae":
        return gae(tokens.rewards, tokens.values, tokens.action_mask, tokens.cu_seqlens, gamma=GAMMA, lam=LAM)
    actions = compacted(tokens)
    advantages = METHODS[name](actions)
    zeros = torch.zeros_like(tokens.values)
    returns = zeros.masked_scatter(tokens.action_mask, (advantages + actions.values).float())
    return zeros.masked_scatter_(tokens.action_mask, advantages.float()), returns


def compacted(tokens: Tokens) -> Actions:
    positions = tokens.action_mask.nonzero().squeeze(1)
    bounds = torch.searchsorted(positions, tokens.cu_seqlens.long())
    rewards, values = (x.index_select(0, positions).double() for x in (tokens.rewards, tokens.values))
    return Actions(rewards, values, bounds)


def check(tokens: Tokens) -> None:
    exact = python_loop(compacted(tokens))
    allowed = TOLERANCE * max(1.0, exact.abs().max().item())
    for name in (*METHODS, "gae"):
        advantages, _ = run(name, tokens)
        error = (advantages[tokens.action_mask].double() - exact).abs().max().item()
        if error > allowed:
            raise SystemExit(f"{name} is off by {error:.2g}, over {allowed:.2g}")


def deltas(actions: Actions) -> Tensor:
    after = pad(actions.values[1:], (0, 1))
    after[actions.bounds[1:] - 1] = 0.0
    return actions.rewards + GAMMA * after - actions.values


def segmented_scan(actions: Actions) -> Tensor:
    """Each pass doubles how far a token sees; it stops at its sequence's end, where the coefficient is 0."""
    x = deltas(actions)
    coefficients = torch.full_like(x, DECAY)
    coefficients[actions.bounds[1:] - 1] = 0.0
    reach, longest = 1, int(actions.bounds.diff().max())
    while reach < longest:
        x = torch.cat([torch.addcmul(x[:-reach], coefficients[:-reach], x[reach:]), x[-reach:]])
        coefficients = torch.cat([coefficients[:-reach] * coefficients[reach:], coefficients[-reach:]])
        reach *= 2
    return x


def padded(x: Tensor, bounds: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """[sequences, length] with zeros after their ends, and which entries are theirs."""
    lengths = bounds.diff()
    length = -(-int(lengths.max()) // multiple) * multiple
    valid = torch.arange(length)[None, :] < lengths[:, None]
    return torch.zeros(valid.shape, dtype=x.dtype).masked_scatter_(valid, x), valid


def chunks(actions: Actions) -> Tensor:
    """A matrix of powers within each chunk, then one chunk after the other, all sequences at once."""
    x, valid = padded(deltas(actions), actions.bounds, CHUNK)
    distance = torch.arange(CHUNK)[None, :] - torch.arange(CHUNK)[:, None]
    powers = torch.where(distance >= 0, DECAY ** distance.clamp(min=0).double(), 0.0)
    x = x.unflatten(1, (-1, CHUNK)) @ powers.T
    carried = DECAY ** torch.arange(CHUNK, 0, -1).double()
    for k in range(x.shape[1] - 2, -1, -1):
        x[:, k].addcmul_(carried, x[:, k + 1, :1])
    return x.flatten(1)[valid]


def python_loop(actions: Actions) -> Tensor:
    rewards, values, bounds = actions.rewards.tolist(), actions.values.tolist(), actions.bounds.tolist()
    advantages = [0.0] * len(values)
    for start, end in pairwise(bounds):
        advantage = after = 0.0
        for t in range(end - 1, start - 1, -1):
            advantage = rewards[t] + GAMMA * after - values[t] + DECAY * advantage
            after = values[t]
            advantages[t] = advantage
    return torch.tensor(advantages, dtype=actions.values.dtype)


def column_loop(actions: Actions) -> Tensor:
    """A step of all sequences at once."""
    x, valid = padded(deltas(actions), actions.bounds)
    columns = x.T.contiguous()  # [length, sequences]
    for k in range(len(columns) - 2, -1, -1):
        columns[k].add_(columns[k + 1], alpha=DECAY)
    return columns.T[valid]


METHODS: dict[str, Method] = {
    "segmented_scan": segmented_scan,
    "chunks": chunks,
    "python_loop": python_loop,
    "column_loop": column_loop,
}

if __name__ == "__main__":
    main()
