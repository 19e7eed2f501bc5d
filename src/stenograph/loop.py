"""The training loop: rollouts, one step on them, new weights to the engine, everything written down and released."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from stenograph import curve
from stenograph.config import Config
from stenograph.engines.base import Engine
from stenograph.errors import StenographError, TraceError
from stenograph.rendering import load_tokenizer
from stenograph.rollouts import Attempts, Batch, batches, evaluate
from stenograph.rundir import RunDir
from stenograph.traces.payloads import Holder
from stenograph.traces.session import Disposition, Ledger
from stenograph.traces.store import TraceStore
from stenograph.training.batch import MASK_REASONS, SIGNALS
from stenograph.training.report import StepReport
from stenograph.training.trainer import Trainer
from stenograph.types import Rollout, Sample, Task
from stenograph.watching import Watcher


@dataclass(slots=True, eq=False)
class Loop:
    """One training run over parts that its caller owns."""

    config: Config
    run: RunDir
    engine: Engine
    on_engine: Callable[[Coroutine[Any, Any, None]], Awaitable[None]]  # runs a call of the engine on its own loop
    store: TraceStore
    trainer: Trainer
    attempts: Attempts
    tasks: Sequence[Task]
    held_out: Sequence[Task]
    dtypes: dict[str, str]
    watcher: Watcher
    version: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    started: float = field(default_factory=time.monotonic)

    async def train(self) -> None:
        """Run all steps. The summary is written whatever happens."""
        status, error = "failed", None
        try:
            await self._steps()
            status = "completed"
        except (asyncio.CancelledError, KeyboardInterrupt):
            status = "interrupted"
            raise
        except Exception as e:
            error = str(e) if isinstance(e, StenographError) else f"{type(e).__name__}: {e}"
            raise
        finally:
            self.run.write_json("summary.json", self.summary(status, error))
            self.watcher.phase("done")

    def summary(self, status: str, error: str | None) -> dict[str, Any]:
        rewards = [row["reward_mean"] for row in self.rows if row.get("reward_mean") is not None]
        return {
            "status": status,
            "steps": len(rewards),
            "policy_version": self.version,
            "reward_first": rewards[0] if rewards else None,
            "reward_last": rewards[-1] if rewards else None,
            "seconds": time.monotonic() - self.started,
            "ledger": asdict(self.ledger),
            "error": error,
            **self.dtypes,
        }

    async def _steps(self) -> None:
        steps = range(self.config.training.steps)
        await self._evaluate(0)
        made = batches(self.attempts, self.tasks, self.config.tasks, self.config.rollouts, steps)
        try:
            self.watcher.phase("rollouts")
            began = time.monotonic()
            async for finished in made:
                exported = Holder("sample", f"step-{finished.step + 1:06d}")
                try:
                    batch, recorded = self._flattened(finished, exported)
                    report, samples = await self._step(batch, recorded)
                    self._record(batch, report, time.monotonic() - began)
                finally:
                    self.store.payloads.release([exported])
                # The gateway owns them, their addresses as well as their records.
                await self.attempts.gateway.release(r.session for r in batch.rollouts if r.session)
                if all(np.isin(sample.versions, (-1, self.version - report.applied)).all() for sample in samples):
                    self._check_difference(report)  # on older turns it also shows what was learnt since
                done = batch.step + 1
                every = self.config.evaluation.every
                if every and (done % every == 0 or done == len(steps)):
                    await self._evaluate(done)
                began = time.monotonic()
                self.watcher.phase("rollouts" if done < len(steps) else "saving")
        finally:
            await made.aclose()
        actor = self.run.path / "checkpoints" / f"step-{len(steps):06d}" / "actor"
        await asyncio.to_thread(self.trainer.save_actor, actor)
        load_tokenizer(self.config.model).save_pretrained(actor)  # with the chat template, so that it can be served

    def _flattened(self, batch: Batch, holder: Holder) -> tuple[Batch, list[Sample]]:
        """The batch and its samples, leased to `holder`.

        A rollout whose session cannot be flattened truly failed, and says why.
        """
        rollouts, samples = [], []
        for rollout in batch.rollouts:
            try:
                if rollout.session:
                    samples += self.store.samples(rollout.session, self.config.select, holder)
            except TraceError as e:
                rollout = replace(rollout, reward=None, parts={}, status="error", error=str(e))
            rollouts.append(rollout)
        return replace(batch, rollouts=tuple(rollouts)), samples

    async def _step(self, batch: Batch, recorded: list[Sample]) -> tuple[StepReport, list[Sample]]:
        judged = {rollout.session for rollout in batch.rollouts if rollout.reward is not None}
        samples = [sample for sample in recorded if sample.session in judged]
        if not samples:
            self._settle(batch.rollouts, applied=False)
            self._account(batch)
            raise StenographError(f"step {batch.step + 1}: nothing to train on; {self._why_nothing(batch.rollouts)}")
        self.watcher.phase("training")
        shared = self.config.engine.kind == "local" and self.config.engine.weights == "shared"
        if shared:  # a step under a running engine would tear the weights within a turn
            await self.on_engine(self.engine.pause("finish"))
        report = await asyncio.to_thread(self.trainer.step, samples)
        if report.applied:
            self.version += 1
            await self.on_engine(self.engine.update_weights(self.trainer.weights, self.version))
        if shared:
            await self.on_engine(self.engine.resume())
        self._settle(batch.rollouts, report.applied)
        self._record_tokens(batch.step + 1, samples)
        return report, samples

    def _settle(self, rollouts: Iterable[Rollout], applied: bool) -> None:
        trained = Disposition("trained") if applied else Disposition("dropped", "step_skipped")
        for rollout in rollouts:
            if rollout.session:
                disposition = trained if rollout.reward is not None else _FAILED
                self.store.settle(rollout.session, disposition, self.config.select)

    def _why_nothing(self, rollouts: Iterable[Rollout]) -> str:
        errors = Counter(rollout.error for rollout in rollouts if rollout.error)
        if errors:
            error, count = errors.most_common(1)[0]
            return f"{count} attempts failed with: {error}"
        if any(rollout.session and self.store.get(rollout.session).num_turns for rollout in rollouts):
            return "none of the branches is selected; widen [select] (roles, max_tokens, overlong)"
        return "the agents made no call that was recorded; do they use OPENAI_BASE_URL?"

    def _record_tokens(self, step: int, samples: list[Sample]) -> None:
        """What the trainer saw at each token, by `session/branch/name`, as far as training.record asks."""
        wanted = self.config.training.record
        limit = {"all": len(samples), "none": 0}.get(wanted)
        chosen = list(zip(samples, self.trainer.last_batch, strict=True))
        chosen = chosen[: int(wanted.partition(":")[2]) if limit is None else limit]
        names = [name for name, signal in SIGNALS.items() if signal.recorded]
        arrays = {f"{s.session}/{s.branch}/{name}": signals[name] for s, signals in chosen for name in names}
        if arrays:
            arrays["mask_reasons"] = np.array(MASK_REASONS)  # what the numbers in mask_reason mean
            self.run.write_arrays(f"tokens/step-{step:06d}.npz", arrays)

    def _account(self, batch: Batch) -> Ledger:
        """Write the step's rollouts down, and check that their tokens are accounted for."""
        sessions = [rollout.session for rollout in batch.rollouts if rollout.session]
        ledgers = {session: self.store.ledger(session) for session in sessions}
        self.run.append("rollouts.jsonl", (self._rollout_row(batch.step, r, ledgers) for r in batch.rollouts))
        astray = [name for name, held in ledgers.items() if not held.balanced or held.in_flight]
        if astray:
            raise TraceError(f"step {batch.step + 1}: tokens are not accounted for in sessions {', '.join(astray)}")
        held = _sum(list(ledgers.values()))
        self.ledger = _sum([self.ledger, held])
        return held

    def _record(self, batch: Batch, report: StepReport, seconds: float) -> None:
        """Write the step down."""
        held = self._account(batch)
        sessions = [rollout.session for rollout in batch.rollouts if rollout.session]
        row = {
            "step": batch.step + 1,
            "policy_version": self.version,
            "time_s": time.monotonic() - self.started,
            **report.row(),
            "num_rollouts": len(batch.rollouts),
            "status": dict(Counter(rollout.status for rollout in batch.rollouts)),
            "num_sampled_tokens": held.sampled,
            "notes": self._counts("notes", sessions),
            "accepted": self._counts("accepted", sessions),
            "forks": dict(Counter(record.cause for session in sessions for record in self.store.drift(session))),
            "training_seconds": report.seconds,
            "seconds": seconds,
            **self.dtypes,
        }
        self._add(row)

    def _counts(self, field: Literal["notes", "accepted"], sessions: Iterable[str]) -> dict[str, int]:
        """On how many turns each name stands: of notes (`parser_disagrees`, ...) or of accepted differences."""
        turns = (turn for session in sessions for turn in self.store.tree(session).turns.values())
        return dict(Counter(name for turn in turns for name in getattr(turn, field)))

    def _rollout_row(self, step: int, rollout: Rollout, ledgers: dict[str, Ledger]) -> dict[str, Any]:
        row = {"step": step + 1, "rollout_id": rollout.id, "group_id": rollout.group_id, "task_id": rollout.task.id}
        for name in ("session", "reward", "parts", "status", "error", "seconds"):
            row[name] = getattr(rollout, name)
        known = rollout.session in ledgers
        row["num_turns"] = self.store.get(rollout.session).num_turns if known else 0
        row["ledger"] = asdict(ledgers.get(rollout.session, Ledger()))
        row["drift"] = [asdict(record) for record in self.store.drift(rollout.session)] if known else []
        row["accepted"] = self._counts("accepted", [rollout.session] if known else [])
        return row

    def _check_difference(self, report: StepReport) -> None:
        """Stop where the engine no longer samples from what the trainer trains."""
        for name in ("logprob_difference_mean", "logprob_difference_p99"):
            limit, measured = getattr(self.config.engine, f"max_{name}"), report.metrics[name]
            if measured is not None and measured > limit:
                pair = f"engine {self.dtypes['engine_dtype']}, trainer {self.dtypes['trainer_dtype']}"
                told = f"{name} is {measured:.3f} ({pair}), over engine.max_{name} = {limit}"
                raise StenographError(f"{told}; bring the dtypes together, or raise the limit")

    async def _evaluate(self, step: int) -> None:
        if not self.config.evaluation.every:
            return
        self.watcher.phase("evaluation")
        result = await evaluate(self.attempts, self.held_out, self.config.evaluation.num_samples)
        row = {"step": step, "policy_version": self.version, "time_s": time.monotonic() - self.started}
        self._add(row | {f"eval_{name}": value for name, value in asdict(result).items()})

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.run.append("metrics.jsonl", [row])
        self.run.write("curve.png", curve.draw(self.rows, self.run.path.name))
        self.watcher.step(row)


_FAILED = Disposition("dropped", "rollout_failed")


def _sum(ledgers: Sequence[Ledger]) -> Ledger:
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
