"""Several stores at work on one database."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stenograph.traces.sqlite import SqliteTraceStore

NUM_STORES = 6


def test_a_new_journal_may_be_opened_by_many_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(NUM_STORES) as pool:
        for number in range(80):
            begun = threading.Barrier(NUM_STORES)

            def use(path: Path = tmp_path / f"{number}.db", begun: threading.Barrier = begun) -> None:
                begun.wait()
                SqliteTraceStore(path).close()

            for opened in [pool.submit(use) for _ in range(NUM_STORES)]:
                opened.result()


LEFT = """
import os, socket, sys
from pathlib import Path
from stenograph.traces.sqlite import SqliteTraceStore

socket.socket(socket.AF_UNIX).bind(sys.argv[2])
SqliteTraceStore(Path(sys.argv[1]), address=sys.argv[2])
SqliteTraceStore(Path(sys.argv[1]), address=sys.argv[3])
os._exit(9)
"""


def test_what_a_killed_process_left_at_its_address_is_removed_and_no_other_file(tmp_path: Path) -> None:
    journal, folder, other = tmp_path / "traces.db", tmp_path / "at", tmp_path / "file"
    folder.mkdir()
    other.touch()
    subprocess.run([sys.executable, "-c", LEFT, journal, folder / "gateway", other], timeout=60, check=False)
    assert (folder / "gateway").is_socket()
    SqliteTraceStore(journal).close()
    assert (folder.exists(), other.exists()) == (False, True)
    assert list(tmp_path.glob("*.lock")) == []
