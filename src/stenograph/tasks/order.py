"""Which tasks a step takes: a pure function of the step, so that a resumed run goes on where it was."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stenograph.types import Task


def tasks_for_step(tasks: Sequence[Task], step: int, num_groups: int, *, seed: int, shuffle: bool) -> list[Task]:
    """`num_groups` tasks for `step`; every pass over the tasks has an order of its own."""
    chosen = []
    for position in range(step * num_groups, (step + 1) * num_groups):
        epoch, index = divmod(position, len(tasks))
        if shuffle:
            index = int(np.random.default_rng([seed % 2**64, epoch]).permutation(len(tasks))[index])
        chosen.append(tasks[index])
    return chosen
