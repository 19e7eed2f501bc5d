"""Three-digit sums, differences and products: out of reach for a small model's head, easy with a calculator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


def make(seed: int, size: int) -> Iterator[dict[str, Any]]:
    """The same tasks for the same seed; another seed makes others."""
    rng = random.Random(seed)
    for n in range(size):
        a, b, sign = rng.randint(100, 999), rng.randint(100, 999), rng.choice("+-*")
        answer = {"+": a + b, "-": a - b, "*": a * b}[sign]
        yield {"id": f"arithmetic-{seed}-{n}", "prompt": f"{a} {sign} {b} = ?", "answer": str(answer)}
