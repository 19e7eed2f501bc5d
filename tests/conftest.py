"""What holds for every test."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """All that was imported stays: an engine that stops looks through everything else for garbage, several times."""
    gc.collect()
    gc.freeze()
