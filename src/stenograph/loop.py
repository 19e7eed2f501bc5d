"""The training loop: rollouts, one step on them, new weights to the engine, everything written down and released.

Where a run can be interrupted, what it goes on from is written down before what follows from it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stenograph.accounts import Accounts
from stenograph.config import Config
from stenograph.engines.base import Engine
from stenograph.errors import StenographError, TraceError
from stenograph.rendering import load_tokenizer
from stenograph.rollouts import Attempts, Batch, batches, evaluate
from stenograph.rundir import RunDir
from stenograph.traces.payloads import Holder
from stenograph.traces.store import TraceStore
from stenograph.training import checkpoints
from stenograph.training.batch import MASK_REASONS, SIGNALS
from stenograph.training.checkpoints import BEGINNING, LoopState
from stenograph.training.recorded import RecordedBatch, read_batch, write_batch
from stenograph.training.report import StepReport
from stenograph.training.trainer import Trainer
from stenograph.types import Rollout, Sample, Task
from stenograph.watching import Watcher


@dataclass(slots=True, eq=False)
class Loop:
    """One training run over parts that its caller owns, from `state` on: first over the batches `rolled_out` since."""

    config: Config
    run: RunDir
    engine: Engine
    on_engine: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]  # runs a call of the engine on its own loop
    store: TraceStore
    trainer: Trainer
    attempts: Attempts
    tasks: Sequence[Task]
    held_out: Sequence[Task]
    dtypes: dict[str, str]
    watcher: Watcher
    accounts: Accounts
    state: LoopState = BEGINNING
    rolled_out: Sequence[Path] = ()

    async def train(self) -> None:
        """Run all steps that are left. The summary is written whatever happens."""
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
        rewards = self.accounts.rewards
        return {
            "status": status,
            "steps": len(rewards),
            "policy_version": self.trainer.version,
            "reward_first": rewards[0] if rewards else None,
            "reward_last": rewards[-1] if rewards else None,
            "seconds": self.accounts.seconds,
            "ledger": asdict(self.accounts.ledger),
            "error": error,
            **self.dtypes,
        }

    async def _steps(self) -> None:
        # Explicitly: whatever the engine began with, its weights and their version are those of the state.
        await self._publish(changed=False)
        await self._draw_from(self.state.engine)
        await self._relearn()
        await self._evaluate()

        steps = range(self.state.step, self.config.training.steps)
        async with aclosing(batches(self.attempts, self.tasks, self.config.tasks, self.config.rollouts, steps)) as made:
            began = self._rolling_out()
            async for finished in made:
                exported = Holder("sample", _name(finished.step))
                try:
                    await self._learn(await self._recorded(finished, exported), began)
                finally:
                    self.store.payloads.release([exported])
                await self._evaluate()
                began = self._rolling_out()

    def _rolling_out(self) -> float:
        """When the next rollouts begin, if any do."""
        if self.state.step < self.config.training.steps:
            self.watcher.phase("rollouts")
        return time.monotonic()

    async def _relearn(self) -> None:
        """Train again on what was rolled out since the state: as it was trained on, if it was."""
        tasks = {task.id: task for task in self.tasks}
        for path in self.rolled_out:
            batch = read_batch(path, tasks)
            await self._draw_from(batch.engine)
            await self._learn(batch, time.monotonic())

    async def _recorded(self, finished: Batch, exported: Holder) -> RecordedBatch:
        """The batch and the samples that are trained, written down so that it can be trained on again.

        Their payloads are leased to `exported`, and with the batch for as long as it is kept. Raises StenographError
        where there is nothing to train on; such a batch is not kept.
        """
        self.watcher.phase("recording")
        rollouts, recorded = self._flattened(finished, exported)
        judged = {rollout.session for rollout in rollouts if rollout.reward is not None}
        samples = tuple(sample for sample in recorded if sample.session in judged)
        if not samples:
            raise self.accounts.nothing_to_train_on(finished.step, rollouts)
        random_state = await self.on_engine(self.engine.random_state())
        batch = RecordedBatch(finished.step, rollouts, samples, random_state)
        if self.config.training.checkpoint_every and self.config.store.kind == "sqlite":
            path = checkpoints.folder(self.run.path, checkpoints.BATCH, batch.step + 1)
            self.store.payloads.lease(batch.payloads, Holder("checkpoint", path.name))
            await asyncio.to_thread(write_batch, path, batch)
        return batch

    def _flattened(self, batch: Batch, holder: Holder) -> tuple[tuple[Rollout, ...], list[Sample]]:
        """The rollouts and their samples, leased to `holder`.

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
        return tuple(rollouts), samples

    async def _learn(self, batch: RecordedBatch, began: float) -> None:
        """One step on a batch. What an interrupted run has written down of it stands as it is."""
        self.watcher.phase("training")
        async with self._engine_yields():
            report = await asyncio.to_thread(self.trainer.step, batch.samples)
            self.watcher.phase("publishing")
            self.state = LoopState(batch.step + 1, batch.engine)
            await self._publish(changed=report.applied)
        self._record_tokens(batch)
        if not self.accounts.has_step(batch.step + 1):
            self._record(batch, report, time.monotonic() - began)
        self.run.sync()  # a release may outlive a power cut, and rows that are only written may not
        # The gateway owns them, their addresses as well as their records.
        await self.attempts.gateway.release(r.session for r in batch.rollouts if r.session)
        current = (-1, self.trainer.version - report.applied)
        if all(np.isin(sample.versions, current).all() for sample in batch.samples):
            self._check_difference(report)  # on older turns it also shows what was learnt since
        await self._save()

    @asynccontextmanager
    async def _engine_yields(self) -> AsyncIterator[None]:
        """A step under a running engine would tear shared weights within a turn, or find no room on the device."""
        if self.config.training.offload:
            await self.on_engine(self.engine.sleep())
            yield
            await self.on_engine(self.engine.wake())
        elif self.config.engine.kind == "local" and self.config.engine.weights == "shared":
            await self.on_engine(self.engine.pause("finish"))
            yield
            await self.on_engine(self.engine.resume())
        else:
            yield

    async def _publish(self, *, changed: bool) -> None:
        """Also where the step has changed nothing: a run that is resumed here begins without a cache, too."""
        if changed:
            self.trainer.phases.enter("publish")
        await self.on_engine(self.engine.update_weights(self.trainer.weights, self.trainer.version))
        self.trainer.phases.enter("rollout")

    async def _draw_from(self, random_state: bytes) -> None:
        if random_state:
            await self.on_engine(self.engine.restore_random_state(random_state))

    def _record_tokens(self, batch: RecordedBatch) -> None:
        """What the trainer saw at each token, by `session/branch/name`, as far as training.record asks."""
        wanted = self.config.training.record
        limit = {"all": len(batch.samples), "none": 0}.get(wanted)
        chosen = list(zip(batch.samples, self.trainer.last_batch, strict=True))
        chosen = chosen[: int(wanted.partition(":")[2]) if limit is None else limit]
        names = [name for name, signal in SIGNALS.items() if signal.recorded]
        arrays = {f"{s.session}/{s.branch}/{name}": signals[name] for s, signals in chosen for name in names}
        if arrays:
            arrays["mask_reasons"] = np.array(MASK_REASONS)  # what the numbers in mask_reason mean
            self.run.write_arrays(f"tokens/{_name(batch.step)}.npz", arrays)

    def _record(self, batch: RecordedBatch, report: StepReport, seconds: float) -> None:
        """Say where the step's tokens ended, and write it down."""
        self.accounts.settle(batch.rollouts, applied=report.num_updates + report.num_critic_updates > 0)
        held = self.accounts.close(batch.step, batch.rollouts)
        row = {
            "step": batch.step + 1,
            "policy_version": self.trainer.version,
            "time_s": self.accounts.seconds,
            **report.row(),
            "num_sampled_tokens": held.sampled,
            **self.accounts.counts(batch.rollouts),
            "training_seconds": report.seconds,
            "seconds": seconds,
            **self.dtypes,
        }
        self.accounts.add(row)

    def _check_difference(self, report: StepReport) -> None:
        """Stop where the engine no longer samples from what the trainer trains."""
        for name in ("logprob_difference_mean", "logprob_difference_p99"):
            limit, measured = getattr(self.config.engine, f"max_{name}"), report.metrics[name]
            if measured is not None and measured > limit:
                pair = f"engine {self.dtypes['engine_dtype']}, trainer {self.dtypes['trainer_dtype']}"
                told = f"{name} is {measured:.3f} ({pair}), over engine.max_{name} = {limit}"
                raise StenographError(f"{told}; bring the dtypes together, or raise the limit")

    async def _save(self) -> None:
        """A checkpoint where one is due, before anything else moves the engine's random state."""
        training, run = self.config.training, self.run.path
        is_last = self.state.step >= training.steps  # a resumed run may ask for fewer than were rolled out
        is_due = training.checkpoint_every and self.state.step % training.checkpoint_every == 0
        if not (is_last or is_due):
            return
        self.watcher.phase("saving")
        path = checkpoints.folder(run, checkpoints.STEP, self.state.step)
        tokenizer = load_tokenizer(self.config.model)
        if training.checkpoint_every:
            await asyncio.to_thread(checkpoints.save, path, self.trainer, self.state, tokenizer)
            checkpoints.prune(run, training.keep_checkpoints, self._let_go)
        else:
            await asyncio.to_thread(checkpoints.save_actor, path / "actor", self.trainer, tokenizer)

    def _let_go(self, batch: str) -> None:
        self.store.payloads.release([Holder("checkpoint", batch)])

    async def _evaluate(self) -> None:
        """On held-out tasks, where that is due: before the first step, after every so many, and after the last.

        A run that is resumed before the next batch was rolled out repeats it, so that it draws on from where the
        evaluation had left the engine; what was measured first stands.
        """
        step, every = self.state.step, self.config.evaluation.every
        is_last = step >= self.config.training.steps
        if not every or (step % every and not is_last) or (is_last and self.accounts.has_evaluation(step)):
            return
        self.watcher.phase("evaluation")
        result = await evaluate(self.attempts, self.held_out, self.config.evaluation.num_samples)
        row = {"step": step, "policy_version": self.trainer.version, "time_s": self.accounts.seconds}
        if not self.accounts.has_evaluation(step):
            self.accounts.add(row | {f"eval_{name}": value for name, value in asdict(result).items()})


def _name(step: int) -> str:
    return f"step-{step + 1:06d}"
