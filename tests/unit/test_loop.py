"""What the loop makes of a step's sessions: selected, trained, settled; a token astray fails the run by name."""

from __future__ import annotations

import json
import threading
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stenograph.accounts import Accounts
from stenograph.config import Config
from stenograph.engines.base import WeightSource
from stenograph.engines.scripted import Line, ScriptedEngine
from stenograph.errors import StenographError, TraceError
from stenograph.loop import Loop
from stenograph.resuming import Resumption, resumption
from stenograph.rundir import RunDir
from stenograph.traces.experts import routed_experts
from stenograph.traces.memory import MemoryTraceStore
from stenograph.traces.payloads import Holder
from stenograph.traces.session import Ledger, Opening
from stenograph.traces.sqlite import SqliteTraceStore
from stenograph.traces.store import TraceStore
from stenograph.training.critic import critic_from_actor
from stenograph.training.report import StepReport
from stenograph.training.trainer import Trainer
from stenograph.types import Payload, Rollout, Sample, Task, Turn
from stenograph.watching import Watchers
from support.models import tiny_model
from support.payloads import is_there, opaque
from support.turns import make_turn

UNLIMITED = {"max_logprob_difference_mean": 99, "max_logprob_difference_p99": 99}  # no model sampled these turns
CONFIG = {
    "engine": {"kind": "scripted", "script": "unread.jsonl", **UNLIMITED},
    "rollouts": {"num_groups": 1, "group_size": 2},
    "training": {"steps": 1, "num_threads": 1, "device": "cpu"},
    "store": {"kind": "memory"},
    "select": {"max_tokens": 8},
}
ROUTED = np.zeros((2, 2, 2), np.uint8)


STEPS = [f"step-{n:06d}-group-0" for n in (1, 2, 3)]
AHEAD = {
    "rollouts": {"num_groups": 1, "group_size": 2, "max_staleness": 1},
    "training": {"steps": len(STEPS), "num_threads": 1, "device": "cpu"},
}


class Recorded:
    """Attempts that were made before: each opens a session, and its turns are in the record."""

    def __init__(self, store: TraceStore, mixed: Sequence[int] = (), *, equal: bool = False) -> None:
        self.store, self.mixed, self.equal = store, mixed, equal
        self.gateway = self

    async def run_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Rollout]:
        return [self._run(n, task, group) for n, (task, group) in enumerate(pairs)]

    async def release(self, sessions: Iterable[str]) -> list[str]:
        return self.store.release(sessions)

    async def discard(self, rollouts: Iterable[Rollout]) -> None:
        self.store.release(rollout.session for rollout in rollouts)

    def _run(self, n: int, task: Task, group: str) -> Rollout:
        session, reward = f"s{n}", 1.0 if self.equal else float(n)
        self.store.open(Opening(session, {"rollout_id": f"r{n}", "group_id": group, "task_id": task.id}))
        first = make_turn([1, 2], [3, 4])
        if n in self.mixed:
            first = replace(first, experts=self.store.payloads.put(ROUTED, Holder("session", session)))
        left, taken = make_turn([5], [6, 7 + n]), make_turn([5], [8])
        self.store.commit(session, None, first)
        self.store.commit(session, first.id, left, taken)
        self.store.commit(session, taken.id, make_turn([9], [10]))
        self.store.commit(session, taken.id, make_turn([11], [12, 13, 14]))  # its branch has 9 tokens
        self.store.seal(session, reward, "completed")
        return Rollout(f"r{n}", group, task, session, reward, "completed")


class Forgetful(MemoryTraceStore):
    """A store that loses a token of one session on the way."""

    def commit(self, session: str, parent: str | None, *turns: Turn) -> None:
        super().commit(session, parent, *turns)
        if session == "s1" and len(turns) == 2:
            output = self.tree(session).node(turns[0].id)
            output.turn = replace(output.turn, output_ids=output.turn.output_ids[:-1])


async def on_engine(work: Coroutine[Any, Any, Any]) -> Any:
    return await work


class Told(ScriptedEngine):
    """Notes the versions that it is told of."""

    def __init__(self, script: list[Line], *, context_length: int) -> None:
        super().__init__(script, context_length=context_length)
        self.versions: list[int] = []

    async def update_weights(self, source: WeightSource, version: int) -> None:
        self.versions.append(version)


class Holding(Recorded):
    """Each attempt is a turn that holds opaque bytes."""

    def __init__(self, store: TraceStore) -> None:
        super().__init__(store)
        self.held: dict[str, list[Payload]] = {}  # by group: a step's
        self.next_is_done = threading.Event()  # what runs ahead of the step that is trained

    async def run_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Rollout]:
        rollouts = await super().run_all(pairs)
        if pairs[0][1] != STEPS[0]:
            self.next_is_done.set()
        return rollouts

    async def release(self, sessions: Iterable[str]) -> list[str]:
        if len(self.held) < len(STEPS):
            self.next_is_done.clear()
        return await super().release(sessions)

    def _run(self, n: int, task: Task, group: str) -> Rollout:
        session = f"{group}-{n}"
        self.store.open(Opening(session, {"rollout_id": session, "group_id": group, "task_id": task.id}))
        payload = self.store.payloads.put(opaque(b"abc"), Holder("request", session))
        self.store.commit(session, None, replace(make_turn([1, 2], [3, 4, 5 + n]), experts=payload))
        self.store.payloads.release([Holder("request", session)])
        self.store.seal(session, float(n), "completed")
        self.held.setdefault(group, []).append(payload)
        return Rollout(session, group, task, session, float(n), "completed")

    def there(self) -> list[tuple[str, int]]:
        """How many payloads are there of each group that has any."""
        there = [(group, sum(is_there(self.store.payloads, one) for one in held)) for group, held in self.held.items()]
        return [(group, num_payloads) for group, num_payloads in there if num_payloads]


class Reading(Trainer):
    """Reads the experts of its samples, and notes what is there at each step; the step `fails_at` fails."""

    def __init__(self, config: Config, attempts: Holding, fails_at: int | None = None) -> None:
        super().__init__(tiny_model(), config)
        self.attempts, self.fails_at = attempts, fails_at
        self.there: list[list[tuple[str, int]]] = []

    def step(self, samples: Sequence[Sample]) -> StepReport:
        self.attempts.next_is_done.wait(20)
        self.there.append(self.attempts.there())
        for sample in samples:
            experts = routed_experts(sample, self.attempts.store.payloads.get)
            assert experts is not None
            assert experts[0].tobytes() == b"\0abc\0"
        if len(self.there) == self.fails_at:
            raise ZeroDivisionError("a bug")
        return super().step(samples)


class Failing(Reading):
    """Does not wait for what runs ahead, of which there is nothing."""

    def step(self, samples: Sequence[Sample]) -> StepReport:
        self.attempts.next_is_done.set()
        return super().step(samples)


def loop(
    folder: Path, store: TraceStore, attempts: Recorded, goes_on: Resumption | None = None, /, **settings: Any
) -> Loop:
    config = Config(**{**CONFIG, **settings})
    directory = RunDir.create(folder / "run", config) if goes_on is None else RunDir(folder / "run")
    goes_on = goes_on or Resumption()
    actor = tiny_model()
    critic = critic_from_actor(actor, seed=0) if config.algorithm.has_critic else None
    return Loop(
        config=config,
        run=directory,
        engine=ScriptedEngine([], context_length=100),
        on_engine=on_engine,
        store=store,
        trainer=Trainer(actor, config, critic=critic),
        attempts=attempts,  # type: ignore[arg-type]
        tasks=[Task("t", "prompt")],
        held_out=[],
        dtypes={"engine_dtype": "none", "trainer_dtype": "float32"},
        watcher=Watchers(),
        accounts=Accounts(directory, store, config.select, Watchers()),
        state=goes_on.state,
        rolled_out=goes_on.batches,
    )


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / name).read_bytes().splitlines()]


async def test_what_is_selected_is_trained_and_the_rest_is_dropped_for_its_reason(tmp_path: Path) -> None:
    store = MemoryTraceStore()
    run = loop(tmp_path, store, Recorded(store))
    await run.train()
    (first, second) = rows(tmp_path, "rollouts.jsonl")
    assert first["ledger"] == second["ledger"]
    assert first["ledger"]["trained"] == 4
    assert first["ledger"]["dropped"] == {"unadopted": 2, "overlong": 3}
    assert run.accounts.ledger == Ledger(18, 8, {}, {"unadopted": 4, "overlong": 6}, 0)


async def test_a_session_that_cannot_be_flattened_fails_its_rollout_and_not_the_run(tmp_path: Path) -> None:
    store = MemoryTraceStore()
    await loop(tmp_path, store, Recorded(store, mixed=[0])).train()
    (failed, trained) = rows(tmp_path, "rollouts.jsonl")
    assert (failed["status"], failed["reward"]) == ("error", None)
    assert "session s0, branch 1: turn" in failed["error"]
    assert failed["ledger"]["dropped"] == {"rollout_failed": 4, "unadopted": 2, "overlong": 3}
    assert trained["status"] == "completed"


async def test_a_step_whose_tokens_are_not_accounted_for_fails_and_names_the_sessions(tmp_path: Path) -> None:
    store = Forgetful()
    with pytest.raises(TraceError, match=r"step 1: tokens are not accounted for in sessions s1$"):
        await loop(tmp_path, store, Recorded(store)).train()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert len(rows(tmp_path, "rollouts.jsonl")) == 2  # what can be seen of it is written down


async def test_a_step_without_a_selected_branch_says_what_to_change(tmp_path: Path) -> None:
    store = MemoryTraceStore()
    run = loop(tmp_path, store, Recorded(store), select={"roles": ["title"]})
    with pytest.raises(StenographError, match=r"none of the branches is selected; widen \[select\]"):
        await run.train()
    assert [row["ledger"]["dropped"] for row in rows(tmp_path, "rollouts.jsonl")] == [{"unadopted": 2, "role": 7}] * 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ledger"]["sampled"] == 18


async def test_a_step_releases_what_its_batch_holds_and_not_what_waits(tmp_path: Path) -> None:
    store = MemoryTraceStore()
    attempts = Holding(store)
    run = loop(tmp_path, store, attempts, **AHEAD)
    run.trainer = trainer = Reading(run.config, attempts)
    await run.train()
    assert trainer.there == [[(STEPS[0], 2), (STEPS[1], 2)], [(STEPS[1], 2), (STEPS[2], 2)], [(STEPS[2], 2)]]
    assert attempts.there() == []


async def test_a_step_that_fails_lets_go_of_its_samples_and_of_what_waits(tmp_path: Path) -> None:
    store = MemoryTraceStore()
    attempts = Holding(store)
    run = loop(tmp_path, store, attempts, **AHEAD)
    run.trainer = Reading(run.config, attempts, fails_at=2)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await run.train()
    assert attempts.there() == [(STEPS[1], 2)]  # of its own sessions, which stay for whoever looks into it
    store.release([f"{STEPS[1]}-0", f"{STEPS[1]}-1"])
    assert attempts.there() == []


RESUMED = {
    "store": {"kind": "sqlite"},
    "training": {
        "steps": len(STEPS),
        "checkpoint_every": len(STEPS),
        "keep_checkpoints": 1,
        "num_threads": 1,
        "device": "cpu",
    },
}


async def test_a_batch_holds_its_experts_until_a_checkpoint_covers_it(tmp_path: Path) -> None:
    """Also those of sessions that were released: the step may have to be repeated."""
    with closing(SqliteTraceStore(tmp_path / "traces.db")) as store:
        attempts = Holding(store)
        run = loop(tmp_path, store, attempts, **RESUMED)
        run.trainer = Failing(run.config, attempts, fails_at=2)
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await run.train()
        assert store.release([f"{STEPS[0]}-0"]) == []  # that was the end of its step

    with closing(SqliteTraceStore(tmp_path / "traces.db")) as store:
        attempts, held = Holding(store), attempts.held
        attempts.held = held
        assert attempts.there() == [(STEPS[0], 2), (STEPS[1], 2)]
        run = loop(tmp_path, store, attempts, resumption(RunDir(tmp_path / "run")), **RESUMED)
        run.trainer = trainer = Failing(run.config, attempts)
        await run.train()
        assert [len(there) for there in trainer.there] == [2, 2, 3]
        assert attempts.there() == []
    assert [row["step"] for row in rows(tmp_path, "metrics.jsonl")] == [1, 2, 3]
    assert [row["step"] for row in rows(tmp_path, "rollouts.jsonl")] == [1, 1, 2, 2, 3, 3]


async def test_an_engine_is_told_anew_after_a_step_that_changed_nothing(tmp_path: Path) -> None:
    """So it goes on without a cache of what came before, as after a resume."""
    store = MemoryTraceStore()
    run = loop(tmp_path, store, Recorded(store, equal=True))
    run.engine = engine = Told([], context_length=100)
    await run.train()
    assert rows(tmp_path, "metrics.jsonl")[0]["applied"] is False
    assert engine.versions == [0, 0]


async def test_a_warm_up_trains_on_its_tokens_and_leaves_the_policy_as_it_is(tmp_path: Path) -> None:
    store = MemoryTraceStore()
    settings = {"algorithm": {"estimator": "gae"}, "critic": {"warmup_steps": 1}}
    run = loop(tmp_path, store, Recorded(store), **settings)
    await run.train()
    (row,) = rows(tmp_path, "metrics.jsonl")
    assert (row["is_warmup"], row["policy_version"], row["num_updates"], row["num_critic_updates"]) == (True, 0, 0, 2)
    assert run.accounts.ledger.trained == 8
    with np.load(tmp_path / "run" / "tokens" / "step-000001.npz") as tokens:
        recorded = {name.rpartition("/")[2] for name in tokens}
    assert recorded >= {"values", "returns", "rewards", "advantages", "loss_mask", "mask_reason", "mask_reasons"}
