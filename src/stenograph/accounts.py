"""What a run did, each of it written down once: a rollout, a step, and where every sampled token ended."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from stenograph import curve
from stenograph.config import SelectConfig
from stenograph.errors import StenographError, TraceError
from stenograph.rundir import RunDir
from stenograph.traces.drift import Drift
from stenograph.traces.session import Disposition, Ledger, SessionRecord
from stenograph.traces.store import TraceStore
from stenograph.types import Rollout, Task, Turn
from stenograph.watching import Watcher

_FAILED = Disposition("dropped", "rollout_failed")
_SKIPPED = Disposition("dropped", "step_skipped")
INTERRUPTED = Disposition("dropped", "interrupted")  # with their run, before their batch was whole


@dataclass(slots=True, eq=False)
class Accounts:
    """The record of a run, which goes on with what is in its folder.

    What a run that was interrupted has written of a step stands, and is not written again when the step is repeated.
    """

    run: RunDir
    store: TraceStore
    select: SelectConfig
    watcher: Watcher
    rows: list[dict[str, Any]] = field(init=False)  # of metrics.jsonl
    ledger: Ledger = field(init=False)  # of all rollouts
    _known: dict[str, Ledger] = field(init=False)  # of the rollouts that were found, by their ids
    _sessions: set[str] = field(init=False)  # of the same
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self.rows = self.run.rows("metrics.jsonl")
        rollouts = self.run.rows("rollouts.jsonl")
        self._known = {row["rollout_id"]: Ledger(**row["ledger"]) for row in rollouts}
        self._sessions = {row["session"] for row in rollouts}
        self.ledger = _sum(self._known.values())
        self._started = time.monotonic() - max((row["time_s"] for row in self.rows), default=0.0)

    @property
    def seconds(self) -> float:
        """That the run took so far; what was not written down when it was interrupted is left out."""
        return time.monotonic() - self._started

    @property
    def rewards(self) -> list[float]:
        """Of the steps, in their order."""
        return [row["reward_mean"] for row in self.rows if row.get("reward_mean") is not None]

    def has_step(self, step: int) -> bool:
        """Whether the row of training step `step`, from 1, stands."""
        return any(row["step"] == step and "reward_mean" in row for row in self.rows)

    def has_evaluation(self, step: int) -> bool:
        return any(row["step"] == step and "eval_reward_mean" in row for row in self.rows)

    def settle(self, rollouts: Iterable[Rollout], *, applied: bool) -> None:
        """Say what became of the tokens of a step's rollouts."""
        trained = Disposition("trained") if applied else _SKIPPED
        for rollout in rollouts:
            if rollout.session and rollout.id not in self._known:
                self.store.settle(rollout.session, trained if rollout.reward is not None else _FAILED, self.select)

    def close(self, step: int, rollouts: Sequence[Rollout]) -> Ledger:
        """Write the rollouts of a step, from 0, down, and check that their tokens are accounted for."""
        known = [self._known[rollout.id] for rollout in rollouts if rollout.id in self._known]
        rollouts = [rollout for rollout in rollouts if rollout.id not in self._known]
        sessions = [rollout.session for rollout in rollouts if rollout.session]
        ledgers = {session: self.store.ledger(session) for session in sessions}
        self.run.append("rollouts.jsonl", (self._rollout_row(step, r, ledgers) for r in rollouts))
        astray = [name for name, held in ledgers.items() if not held.balanced or held.in_flight]
        if astray:
            raise TraceError(f"step {step + 1}: tokens are not accounted for in sessions {', '.join(astray)}")
        new = _sum(ledgers.values())
        self.ledger = _sum([self.ledger, new])
        return _sum([*known, new])

    def interrupted(self, record: SessionRecord) -> None:
        """Write a rollout down that its run did not live to see in a batch."""
        told = record.opening.metadata
        task = Task(str(told.get("task_id")), "")
        rollout = Rollout(told["rollout_id"], told["group_id"], task, record.id, record.reward, "interrupted")
        held = record.ledger()
        step = int(rollout.group_id.removeprefix("step-").partition("-")[0])
        self.run.append("rollouts.jsonl", [_row(step, rollout, held, record.drift, record.tree.turns)])
        self.ledger = _sum([self.ledger, held])

    def has_session(self, session: str) -> bool:
        """Whether the rollout of a session was found in the record."""
        return session in self._sessions

    def counts(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """What a step's row says of its rollouts."""
        turns = [turn for r in rollouts if r.session for turn in self.store.tree(r.session).turns.values()]
        drift = [record for r in rollouts if r.session for record in self.store.drift(r.session)]
        return {
            "num_rollouts": len(rollouts),
            "status": dict(Counter(rollout.status for rollout in rollouts)),
            "notes": _counted(turns, "notes"),
            "accepted": _counted(turns, "accepted"),
            "forks": dict(Counter(record.cause for record in drift)),
        }

    def add(self, row: dict[str, Any]) -> None:
        """Write a row of metrics down, and draw them."""
        self.rows.append(row)
        self.run.append("metrics.jsonl", [row])
        self.run.write("curve.png", curve.draw(self.rows, self.run.path.name))
        self.watcher.step(row)

    def nothing_to_train_on(self, step: int, rollouts: Sequence[Rollout]) -> StenographError:
        """Account for a step whose rollouts left no sample; why that is."""
        self.settle(rollouts, applied=False)
        self.close(step, rollouts)
        return StenographError(f"step {step + 1}: nothing to train on; {self._why_nothing(rollouts)}")

    def _why_nothing(self, rollouts: Sequence[Rollout]) -> str:
        errors = Counter(rollout.error for rollout in rollouts if rollout.error)
        if errors:
            error, count = errors.most_common(1)[0]
            return f"{count} attempts failed with: {error}"
        if any(rollout.session and self.store.get(rollout.session).num_turns for rollout in rollouts):
            return "none of the branches is selected; widen [select] (roles, max_tokens, overlong)"
        return "the agents made no call that was recorded; do they use OPENAI_BASE_URL?"

    def _rollout_row(self, step: int, rollout: Rollout, ledgers: Mapping[str, Ledger]) -> dict[str, Any]:
        if rollout.session not in ledgers:  # it never had one
            return _row(step + 1, rollout, Ledger(), [], {})
        turns = self.store.tree(rollout.session).turns
        return _row(step + 1, rollout, ledgers[rollout.session], self.store.drift(rollout.session), turns)


def _row(
    step: int, rollout: Rollout, ledger: Ledger, drift: Sequence[Drift], turns: Mapping[str, Turn]
) -> dict[str, Any]:
    row = {"step": step, "rollout_id": rollout.id, "group_id": rollout.group_id, "task_id": rollout.task.id}
    for name in ("session", "reward", "parts", "turn_rewards", "status", "error", "seconds"):
        row[name] = getattr(rollout, name)
    row["num_turns"] = len(turns)
    row["ledger"] = asdict(ledger)
    row["drift"] = [asdict(record) for record in drift]
    row["accepted"] = _counted(turns.values(), "accepted")
    return row


def _counted(turns: Iterable[Turn], names: Literal["notes", "accepted"]) -> dict[str, int]:
    """On how many turns each name stands: of notes (`parser_disagrees`, ...) or of accepted differences."""
    return dict(Counter(name for turn in turns for name in getattr(turn, names)))


def _sum(ledgers: Iterable[Ledger]) -> Ledger:
    total = Ledger()
    for held in ledgers:
        total = replace(
            total,
            sampled=total.sampled + held.sampled,
            trained=total.trained + held.trained,
            in_flight=total.in_flight + held.in_flight,
            masked=dict(Counter(total.masked) + Counter(held.masked)),
            dropped=dict(Counter(total.dropped) + Counter(held.dropped)),
        )
    return total
