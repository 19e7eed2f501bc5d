"""A session that is written turn by turn, for tests of what is trained."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from stenograph.config import SelectConfig
from stenograph.traces.memory import MemoryTraceStore
from stenograph.traces.payloads import Holder
from stenograph.traces.session import Disposition, Opening
from stenograph.types import BranchRole, Sample, Sampling, Turn
from support.turns import make_turn

TRAINED = Disposition("trained")
TAKING = Holder("request", "call")


class Recorder:
    """A session that is written turn by turn; every turn has tokens of its own."""

    def __init__(self) -> None:
        self.store = MemoryTraceStore()
        self.store.open(Opening("s"))
        self._tokens = itertools.count(1)

    def turn(self, after: Turn | None = None, *, num_context: int = 1, num_output: int = 2, **said: Any) -> Turn:
        """Record a turn that goes on from `after` with new context."""
        (turn,) = self.choices(after, 1, num_context=num_context, num_output=num_output, **said)
        return turn

    def choices(
        self,
        after: Turn | None,
        num_choices: int,
        *,
        num_context: int = 1,
        num_output: int = 2,
        sampling: Sampling | None = None,
        role: BranchRole = "main",
        rows: np.ndarray | None = None,
        extends: bool = True,
    ) -> list[Turn]:
        """Record siblings: answers to one prompt, which is rendered anew where it does not extend `after`'s ids."""
        context = list(itertools.islice(self._tokens, num_context))
        turns = []
        for _ in range(num_choices):
            output = list(itertools.islice(self._tokens, num_output))
            turn = make_turn(context, output, sampling=sampling, versions=((0, len(turns)), (1, 9)))
            experts = None if rows is None else self.store.payloads.put(rows, TAKING)
            turns.append(replace(turn, role=role, experts=experts, extends=extends))
        self.store.commit("s", after and after.id, *turns)
        self.store.payloads.release([TAKING])
        return turns

    def samples(self, **select: Any) -> list[Sample]:
        return self.store.samples("s", SelectConfig(**select))

    def settled(self, **select: Any) -> dict[str, Any]:
        """What trained, and the rest by reason, after a step on the samples."""
        self.store.settle("s", TRAINED, SelectConfig(**select))
        ledger = self.store.ledger("s")
        assert (ledger.balanced, ledger.in_flight) == (True, 0)
        return {"trained": ledger.trained, **ledger.masked, **ledger.dropped}
