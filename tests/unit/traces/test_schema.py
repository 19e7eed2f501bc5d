"""A journal of any earlier version is read as this one's; what is newer, or is none, is one clear error."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from stenograph import cli
from stenograph.errors import ConfigError
from stenograph.traces import schema
from stenograph.traces.journal import Journal
from stenograph.traces.session import Opening
from stenograph.traces.sqlite import SqliteTraceStore
from support.turns import make_turn

VERSION_1 = Path(__file__).parents[2] / "fixtures" / "journal_1.sql"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traces.db"


def no_database(path: Path) -> None:
    path.write_bytes(b"this is a text, and a long one: " * 200)


def of_another_application(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE accounts (id)")


def marked_by_another_application(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA application_id = 7")


def of_a_newer_version(path: Path) -> None:
    with closing(SqliteTraceStore(path)):
        pass
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {schema.VERSION + 1}")


def a_damaged_header(path: Path) -> None:
    with closing(SqliteTraceStore(path)):
        pass
    raw = path.read_bytes()
    path.write_bytes(bytes(100) + raw[100:])


def a_folder(path: Path) -> None:
    path.mkdir()


WRONG = {
    no_database: "cannot be opened as a journal: file is not a database; restore it from a copy, or choose another",
    of_another_application: "is a database of something else; choose another file",
    marked_by_another_application: "is a database of something else; choose another file",
    of_a_newer_version: rf"newer Stenograph \(schema {schema.VERSION + 1}, this one reads up to {schema.VERSION}\)",
    a_damaged_header: "cannot be opened as a journal: file is not a database",
    a_folder: "cannot be opened as a journal: .*; restore it from a copy, or choose another file",
}


@pytest.mark.parametrize(("make", "told"), WRONG.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_what_is_no_journal_of_ours_is_refused_in_one_line_and_left_as_it_is(
    path: Path, make: Callable[[Path], None], told: str
) -> None:
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(ConfigError, match=told) as error:
        SqliteTraceStore(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    if before is not None:
        assert path.read_bytes() == before
        with pytest.raises(ConfigError, match=told):
            Journal.reading(path)
    assert list(path.parent.glob("*.lock")) == []


@pytest.mark.parametrize("make", [no_database, of_a_newer_version], ids=lambda make: make.__name__)
def test_the_command_says_it_in_one_line_and_ends_with_2(
    tmp_path: Path, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "traces.db")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.jsonl"
    script.write_text('{"content": "hi"}\n')
    serve = ["serve", "--port", "0", "--engine", f"scripted:{script}", "--store", f"sqlite:{tmp_path}/traces.db"]
    for command in (["inspect", str(tmp_path)], serve):
        monkeypatch.setattr(sys, "argv", ["steno", *command])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert str(tmp_path / "traces.db") in err


# --- older ones --------------------------------------------------------------------------------------------------


def test_version_1_is_read(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(VERSION_1.read_text())
    for opened in (Journal.reading, Journal.writing):
        with opened(path) as journal:
            record = journal.load("s")
        first, second = record.tree.turns
        assert record.tree.path_ids(second).tolist() == [1, 2, 3, 4, 5]
        assert (record.tree.parent(second), record.tree.state(first)) == (first, "delivered")
        assert record.tree.turn(first).rollout_logprobs.tolist() == [-1.0, -2.0]
        assert [message.content for message in record.tree.said(second)] == ["hello", "hi é", "and?", "well"]
        assert (record.state, record.reward, record.opening.metadata) == ("sealed", 1.0, {"task_id": "t"})
        ledger = record.ledger()
        assert (ledger.sampled, ledger.trained, ledger.dropped) == (6, 3, {"aborted": 3})
        assert record.opening.key_digest == b"\x01\x02"


LATER = (*schema._STEPS, ("ALTER TABLE turns ADD COLUMN colour TEXT",), ("CREATE TABLE colours (name TEXT)",))


def test_an_older_version_goes_through_the_steps_that_it_lacks(path: Path) -> None:
    with closing(SqliteTraceStore(path)) as store:
        store.open(Opening("s"))
        store.commit("s", None, make_turn([1], [2]))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        schema.prepare(connection, path, LATER)
        schema.prepare(connection, path, LATER)
        assert connection.execute("SELECT colour FROM turns").fetchall() == [(None,)]
        assert connection.execute("SELECT * FROM colours").fetchall() == []
        assert connection.execute("PRAGMA user_version").fetchone() == (schema.VERSION + 2,)
    with pytest.raises(ConfigError, match="newer"):
        Journal.writing(path)


def test_a_step_that_fails_leaves_the_database_as_it_was(path: Path) -> None:
    with closing(SqliteTraceStore(path)):
        pass
    broken = (*LATER, ("CREATE TABLE others (name TEXT)", "NO SQL"))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        with pytest.raises(sqlite3.Error):
            schema.prepare(connection, path, broken)
        assert connection.execute("PRAGMA user_version").fetchone() == (schema.VERSION,)
        assert not connection.execute("SELECT 1 FROM sqlite_master WHERE name IN ('colours', 'others')").fetchall()


def test_many_processes_may_make_it_and_bring_it_further_at_once(path: Path) -> None:
    begin = "import sqlite3, sys\nfrom pathlib import Path\nfrom stenograph.traces import schema\n"
    begin += "from stenograph.traces.journal import Journal\npath = Path(sys.argv[1])\nsys.stdin.readline()\n"
    makes = "Journal.writing(path).close()"
    migrates = f"schema.prepare(sqlite3.connect(path, isolation_level=None, timeout=20), path, {LATER!r})"
    for program in (begin + makes, begin + migrates):
        command = [sys.executable, "-c", program, str(path)]
        processes = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for _ in range(4)]
        for process in processes:
            process.communicate("go\n", timeout=30)
        assert [process.returncode for process in processes] == [0] * 4
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (schema.VERSION + 2,)


# --- where it cannot be written ------------------------------------------------------------------------------------


def as_nobody(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program that files' modes hold for."""
    drop = "import os\nif os.getuid() == 0: os.setgid(65534), os.setuid(65534)\n"
    imports = "import sys\nfrom pathlib import Path\nfrom stenograph.errors import StenographError\n"
    imports += "from stenograph.traces.journal import Journal\nfrom stenograph.traces.sqlite import SqliteTraceStore\n"
    return subprocess.run(
        [sys.executable, "-c", imports + drop + code, *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def locked() -> Iterator[Path]:
    """A journal in a folder that nobody may write to, as it is left when its gateway has ended."""
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with closing(SqliteTraceStore(run / "traces.db")) as store:
            store.open(Opening("s"))
            store.commit("s", None, make_turn([1], [2, 3]))
        Path(folder).chmod(0o755)
        (run / "traces.db").chmod(0o444)
        run.chmod(0o555)
        yield run / "traces.db"
        run.chmod(0o755)


def test_a_journal_that_nobody_may_write_can_be_read(locked: Path) -> None:
    read = "print(Journal.reading(Path(sys.argv[1])).load('s').ledger().sampled)"
    done = as_nobody(read, str(locked))
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_recording_where_nobody_may_write_is_refused_in_one_line(locked: Path) -> None:
    write = "try:\n    SqliteTraceStore(Path(sys.argv[1]))\nexcept StenographError as e: print(type(e).__name__, e)"
    for path in (locked, locked.with_name("other.db"), locked.parent / "new" / "traces.db"):
        done = as_nobody(write, str(path))
        assert (done.stdout[:11], done.stdout.count("\n"), done.stderr) == ("ConfigError", 1, "")
        assert "choose another file" in done.stdout
