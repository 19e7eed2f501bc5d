"""A run's journal as a file; a session is in memory only while its rows are written."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from stenograph.config import SelectConfig
from stenograph.errors import ConfigError, TraceError, UnknownSession
from stenograph.interchange import files
from stenograph.interchange.columns import Row
from stenograph.interchange.rows import session_rows
from stenograph.traces.journal import Journal

log = logging.getLogger(__name__)


def export_run(journal: Journal, path: Path, format: str, select: SelectConfig) -> dict[str, int]:
    """Write the branches that a journal's sessions were settled by, else those that `select` chooses. Returns counts.

    A session that cannot be read or flattened is left out, counted and logged. Raises as `files.write` does, and
    ConfigError where `path` is the journal's.
    """
    target = path.resolve()
    if target == journal.path or str(target).startswith(
        f"{journal.path}-"
    ):  # what SQLite and its owners keep beside it
        raise ConfigError(f"--output {path} belongs to the run's journal; name another file")
    counts = {"sessions": 0, "rows": 0, "left_out": 0}
    files.write(_rows(journal, select, counts), path, format)
    return counts


def _rows(journal: Journal, select: SelectConfig, counts: dict[str, int]) -> Iterator[Row]:
    for name in journal.sessions():
        num_before = counts["rows"]
        try:
            record = journal.load(name)
            for row in session_rows(record, journal.value, select):
                counts["rows"] += 1
                yield row
            record.tree.release()
        except UnknownSession:
            continue  # it was pruned meanwhile
        except TraceError as e:
            counts["left_out"] += 1
            log.warning("left out: %s", e)
        counts["sessions"] += counts["rows"] > num_before
