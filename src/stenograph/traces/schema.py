"""The journal's tables. A database says by its version which of the steps it has been through; the rest follow."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from stenograph.errors import ConfigError

APPLICATION_ID = 0x5354454E  # "STEN", in the header of the file

# A step that databases have been through is never changed: what comes new is another step.
_STEPS: tuple[tuple[str, ...], ...] = (
    (
        # `opening`: what the session was opened with, as JSON. `owner`: the store that holds it in memory.
        """CREATE TABLE sessions (
            number INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            key_digest BLOB NOT NULL,
            opening TEXT NOT NULL,
            opened_s REAL NOT NULL,
            released_s REAL,
            owner TEXT
        )""",
        "CREATE INDEX sessions_by_key ON sessions (key_digest)",
        "CREATE INDEX sessions_by_release ON sessions (released_s) WHERE released_s IS NOT NULL",
        # Never changed once written. `record`: all but the arrays, as JSON (`traces.written`).
        """CREATE TABLE turns (
            number INTEGER PRIMARY KEY,
            session INTEGER NOT NULL REFERENCES sessions (number),
            id TEXT NOT NULL,
            parent TEXT,
            call TEXT NOT NULL,
            shared_turn TEXT,
            shared_tokens INTEGER,
            context_ids BLOB NOT NULL,
            output_ids BLOB NOT NULL,
            rollout_logprobs BLOB NOT NULL,
            record TEXT NOT NULL,
            checksum INTEGER NOT NULL
        )""",
        "CREATE INDEX turns_by_session ON turns (session)",
        # What else became of a session, in its order. `kind`: mark, drop, seal or settle.
        """CREATE TABLE events (
            number INTEGER PRIMARY KEY,
            session INTEGER NOT NULL REFERENCES sessions (number),
            kind TEXT NOT NULL,
            record TEXT NOT NULL,
            checksum INTEGER NOT NULL
        )""",
        "CREATE INDEX events_by_session ON events (session)",
        # Turns and events that could not be read, and why; they stay where they are. `place`: turns or events.
        """CREATE TABLE quarantined (
            place TEXT NOT NULL,
            number INTEGER NOT NULL,
            reason TEXT NOT NULL,
            found_s REAL NOT NULL,
            PRIMARY KEY (place, number)
        )""",
        # What was at work on the database: its configuration as TOML, and what tells its tokenizer from another.
        "CREATE TABLE starts (started_s REAL NOT NULL, config TEXT NOT NULL, tokenizer TEXT NOT NULL)",
        # Stores that are at work on the database, as long as their locks are held (`traces.owners`).
        "CREATE TABLE owners (id TEXT PRIMARY KEY, address TEXT NOT NULL)",
    ),
    (
        # What turns hold by handle alone, and for whom; `owner` is empty where the lease outlives its process.
        "CREATE TABLE payloads (id TEXT PRIMARY KEY, data BLOB NOT NULL, checksum INTEGER NOT NULL)",
        """CREATE TABLE leases (
            payload TEXT NOT NULL REFERENCES payloads (id),
            kind TEXT NOT NULL,
            holder TEXT NOT NULL,
            owner TEXT NOT NULL,
            PRIMARY KEY (kind, holder, owner, payload)
        ) WITHOUT ROWID""",
        "CREATE INDEX leases_by_payload ON leases (payload)",
    ),
)
VERSION = len(_STEPS)


def prepare(connection: sqlite3.Connection, path: Path, steps: tuple[tuple[str, ...], ...] = _STEPS) -> None:
    """Bring the database to this version. Raises ConfigError for one that is newer, or that is not a journal."""
    if _version(connection, path, len(steps)) == len(steps):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Again, for another process may have been quicker.
        for statements in steps[_version(connection, path, len(steps)) :]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(steps)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # where SQLite has not ended it by itself
            connection.execute("ROLLBACK")
        raise


def is_current(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the database has been through all steps; raises as `prepare` does."""
    return _version(connection, path, VERSION) == VERSION


def _version(connection: sqlite3.Connection, path: Path, newest: int) -> int:
    connection.execute("SAVEPOINT version")  # the three of one moment, while another process may create the tables
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    finally:
        connection.execute("RELEASE version")
    if application != APPLICATION_ID and (application or version or num_tables):
        raise ConfigError(f"{path} is a database of something else; choose another file (--store sqlite:PATH)")
    if version > newest:
        told = f"{path} was written by a newer Stenograph (schema {version}, this one reads up to {newest})"
        raise ConfigError(f"{told}; upgrade, or choose another file (--store sqlite:PATH)")
    return version
