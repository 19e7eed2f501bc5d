"""Rows as a folder of `datasets`, of the very bytes that Arrow wrote: nothing of it is inferred."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from stenograph.errors import ConfigError
from stenograph.interchange.arrow import NUM_READ, SCHEMA, batch_of, rows_of
from stenograph.interchange.columns import Row


def write_hf(batches: Iterable[Sequence[Row]], path: Path) -> None:
    """Make the folder `path`. Beside it stands meanwhile what `datasets` copies from.

    Raises ConfigError where there are no rows.
    """
    stream = path.with_name(path.name + ".arrow")
    try:
        with pa.OSFile(str(stream), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:
            for rows in batches:
                writer.write_batch(batch_of(rows))
        written = datasets.Dataset.from_file(str(stream))
        if not written.num_rows:
            raise ConfigError("there are no rows to write, and `datasets` loads no folder without; export as parquet")
        with _quiet():
            written.save_to_disk(path)
    finally:
        stream.unlink(missing_ok=True)


def read_hf(path: Path) -> Iterator[dict[str, Any]]:
    """Raises ValueError where `path` holds several datasets."""
    loaded = datasets.load_from_disk(str(path))
    if not isinstance(loaded, datasets.Dataset):
        raise ValueError(f"it holds the datasets {', '.join(map(str, loaded))}; name the folder of one of them")
    for table in loaded.with_format("arrow").iter(batch_size=NUM_READ):
        yield from rows_of(table)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars: stderr is for errors."""
    was_quiet = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not was_quiet:
            datasets.enable_progress_bars()
