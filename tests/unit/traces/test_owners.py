"""Several stores at work on one database."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from stenograph.errors import OwnedElsewhere
from stenograph.traces.journal import Journal
from stenograph.traces.session import Opening
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
import pytest

from stenograph.errors import OwnedElsewhere
from stenograph.traces.journal import Journal
from stenograph.traces.session import Opening
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


def test_a_copy_leaves_the_address_of_who_is_at_work_on_the_original(tmp_path: Path) -> None:
    (tmp_path / "at").mkdir()
    address = tmp_path / "at" / "gateway"
    (tmp_path / "run").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen(0)
        with closing(SqliteTraceStore(tmp_path / "run" / "traces.db", address=str(address))) as store:
            store.open(Opening("s"))
            shutil.copytree(tmp_path / "run", tmp_path / "copy")
            for _ in range(3):  # with no room for more that ask, too
                with closing(SqliteTraceStore(tmp_path / "copy" / "traces.db")) as copy:
                    assert copy.get("s").id == "s"
                assert address.is_socket()


def test_a_session_has_one_owner_whatever_links_lead_to_its_journal(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "folder").symlink_to("run")
    (tmp_path / "link.db").symlink_to("run/traces.db")
    with closing(SqliteTraceStore(tmp_path / "run" / "traces.db")) as store:
        store.open(Opening("s"))
        for path in (tmp_path / "link.db", tmp_path / "folder" / "traces.db"):
            with closing(SqliteTraceStore(path)) as other, pytest.raises(OwnedElsewhere):
                other.get("s")
            with Journal.reading(path) as journal:
                assert journal.num_wal_bytes() > 0
        assert store.get("s").id == "s"
    assert list(tmp_path.glob("link.db-*")) == []
