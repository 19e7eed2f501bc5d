"""Sessions at random, as any store may hold them, and all that can be read of one, to compare."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from stenograph.config import SelectConfig
from stenograph.traces.export import tree_row
from stenograph.traces.samples import flatten
from stenograph.traces.selection import selected
from stenograph.traces.session import Disposition, Opening
from stenograph.traces.store import TraceStore
from stenograph.types import Sample, Sampling, Tool
from support.turns import make_turn, user

SYSTEM = list(range(1000, 1200))  # what agents of one kind have in common is worth sharing
SELECTS = (SelectConfig(), SelectConfig(roles=("main", "compaction"), max_tokens=240, overlong="truncate"))


def fill(store: TraceStore, session: str, chance: random.Random, num_calls: int = 12, *, ends: bool = True) -> None:
    """Open a session and have done with it what a gateway and a trainer do."""
    store.open(
        Opening(session, {"rollout_id": "r", "task_id": 3, "x": {"é": [1.5, None]}}, key_digest=session.encode())
    )
    turns: list[str] = []
    for n in range(num_calls):
        parent = chance.choice([*turns[-3:], *turns[-3:], None]) if turns else None
        context = [chance.randrange(4) for _ in range(chance.randrange(1, 5))]
        extends = parent is not None and chance.random() < 0.8
        if not extends and chance.random() < 0.8:
            context = SYSTEM + context
        siblings = [
            replace(
                make_turn(
                    context,
                    [chance.randrange(4) for _ in range(chance.choice([0, 1, 3, 30]))],
                    asked=[user(f"{chance.randrange(3)}") for _ in range(chance.choice([1, 1, 2]))],
                    said=chance.choice(["", "said", f"{n} é🙂"]),
                    sampling=chance.choice([Sampling(), Sampling(seed=2**63), Sampling(temperature=0.0)]),
                    tools=chance.choice([(), (Tool("f", "does", {"type": "object", "a": {"b": [1, 2.5]}}),)]),
                ),
                extends=extends or parent is None,
                role=chance.choice(["main", "main", "compaction", "title"]),
                accepted=chance.choice([(), ("header_changed",)]),
                started_s=chance.random(),
            )
        ]
        for _ in range(chance.choice([0, 0, 0, 1, 2])):
            other = make_turn([], [chance.randrange(4) for _ in range(5)], said=chance.choice(["said", "other"]))
            ids, logprobs = other.output_ids, other.rollout_logprobs
            siblings.append(
                replace(siblings[0], id=other.id, output_ids=ids, rollout_logprobs=logprobs, reply=other.reply)
            )
        store.commit(session, parent, *siblings)
        turns += [turn.id for turn in siblings]
        if chance.random() < 0.6:
            store.mark(session, [turn.id for turn in siblings], chance.choice(["delivered", "undelivered"]))
        if chance.random() < 0.2:
            store.drop(session, chance.choice(["aborted", "engine_failed"]), chance.randrange(1, 9))
        if chance.random() < 0.1:
            store.settle(session, Disposition("trained"), chance.choice(SELECTS))
    if ends and chance.random() < 0.7:
        store.seal(session, 0.25, "completed", [n / 3 for n in range(chance.randrange(len(turns) + 1))])
        store.settle(session, chance.choice([Disposition("trained"), Disposition("dropped", "step_skipped")]))


def everything(store: TraceStore, session: str) -> dict[str, Any]:
    """All that a store says of a session, as values that can be compared."""
    tree = store.tree(session)
    others = [flatten("s", tree, selected(tree, select), None, {}, {}) for select in SELECTS]
    return {
        "info": store.get(session),
        "tree": tree_row(tree, with_ids=False),
        "nodes": [node.ids.tolist() for node in tree.nodes()],
        "paths": {turn: tree.path_ids(turn).tolist() for turn in tree.turns},
        "turns": [asdict(replace(turn, context_ids=None)) | _arrays(turn) for turn in tree.turns.values()],
        "said": {turn: tree.said(turn) for turn in tree.turns},
        "samples": [_comparable(sample) for samples in (store.samples(session), *others) for sample in samples],
        "ledger": store.ledger(session),
        "drift": store.drift(session),
    }


def _arrays(turn: Any) -> dict[str, Any]:
    names = ("context_ids", "output_ids", "rollout_logprobs")
    return {name: (getattr(turn, name).dtype, getattr(turn, name).tolist()) for name in names}


def _comparable(sample: Sample) -> dict[str, Any]:
    held = {name: getattr(sample, name) for name in sample.__dataclass_fields__}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in held.items()}
