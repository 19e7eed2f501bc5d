"""How a run that ended early goes on: from its newest checkpoint, over the batches that were rolled out since."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from stenograph.accounts import INTERRUPTED, Accounts
from stenograph.config import Config
from stenograph.config_loading import load_config
from stenograph.errors import ConfigError, OwnedElsewhere, UnknownSession, boundary
from stenograph.rundir import LOCK, RunDir
from stenograph.traces.journal import Journal
from stenograph.traces.store import TraceStore
from stenograph.training.checkpoints import (
    BATCH,
    BEGINNING,
    STEP,
    LoopState,
    Origin,
    folder,
    found,
    load_loop,
    remove_halves,
)
from stenograph.training.recorded import sessions_of

# What a run's state is about, and what its batches were made by; all else may change when it is resumed.
_FIXED = ("model", "store", "tasks", "select", "rollouts.num_groups", "algorithm.has_critic", "critic.path")


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a run goes on from: the beginning where there is no checkpoint yet, then the batches in order."""

    origin: Origin | None = None
    state: LoopState = BEGINNING
    batches: tuple[Path, ...] = ()


def resumed_config(run: Path, overrides: list[str] | None) -> Config:
    """The configuration of `run` with `overrides`. Raises ConfigError for one that its state means nothing under."""
    file = run / "config.toml"
    if not (run / LOCK).is_file() or not file.is_file():
        raise ConfigError(f"{run} is not the folder of a run of steno train; give the one that it told when it began")
    with boundary(ConfigError, f"read {file}"):
        recorded = Config(**tomllib.loads(file.read_text(encoding="utf-8")))
    for told, is_so in (
        ('store.kind = "memory"', recorded.store.kind == "memory"),
        ("training.checkpoint_every = 0", recorded.training.checkpoint_every == 0),
    ):
        if is_so:
            raise ConfigError(f"{run} was trained with {told}, and keeps nothing to go on from; begin a new run")
    config = load_config(file, overrides)
    for name in _FIXED:
        before, now = _setting(recorded, name), _setting(config, name)
        if before != now:
            raise ConfigError(f"{run} cannot go on with another {name}; leave it as it is, or begin a new run")
    return config


def is_over(run: Path, config: Config) -> bool:
    """Whether `run` is complete, and `config` asks for no more."""
    summary = run / "summary.json"
    with boundary(ConfigError, f"read {summary}"):
        told = orjson.loads(summary.read_bytes()) if summary.exists() else {}
    return told.get("status") == "completed" and told["steps"] >= config.training.steps


def resumption(run: RunDir) -> Resumption:
    """What a run whose folder is locked goes on from; what a crash has left half written there is removed.

    Raises CheckpointError where the newest checkpoint is damaged, ConfigError where the record has steps that nothing
    leads to any more.
    """
    remove_halves(run.path)
    run.mend()
    origin, state = None, BEGINNING
    if steps := found(run.path, STEP):
        origin = Origin(folder(run.path, STEP, steps[-1]), is_own=True)
        state = load_loop(origin.checkpoint)
    recorded, end = set(found(run.path, BATCH)), state.step
    while end + 1 in recorded:
        end += 1
    last = max((row["step"] for row in run.rows("metrics.jsonl") if "reward_mean" in row), default=0)
    if last > end:
        told = f"{run.path} is recorded up to step {last}, and its checkpoints and batches lead to step {end} alone"
        raise ConfigError(f"{told}; begin a new run with --init-from {run.path}")
    return Resumption(origin, state, tuple(folder(run.path, BATCH, n) for n in range(state.step + 1, end + 1)))


def account_for_dead(store: TraceStore, journal: Path, accounts: Accounts, batches: Iterable[Path]) -> None:
    """Drop and release what the run that ended early has left in the journal, but the rollouts of `batches`.

    It comes before the gateway, which would take over sessions that are left.
    """
    kept = {session for batch in batches for session in sessions_of(batch)}
    with Journal.reading(journal) as dead:
        for session in dead.sessions():
            if session not in kept:
                with suppress(UnknownSession, OwnedElsewhere):
                    if not accounts.has_session(session):
                        _drop(store, dead, session, accounts)
                    store.release([session])


def _drop(store: TraceStore, journal: Journal, session: str, accounts: Accounts) -> None:
    record = journal.load(session)
    if not record.opening.traced or "rollout_id" not in record.opening.metadata:
        return
    if not record.released:
        store.settle(session, INTERRUPTED, accounts.select)
        record = journal.load(session)
    accounts.interrupted(record)


def _setting(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value
