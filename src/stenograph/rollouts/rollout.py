"""One attempt: its session is sealed, or deleted where nobody will train on it; a failure stays its own."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from stenograph.agents.base import Agent, SessionHandle
from stenograph.errors import JudgeError, RolloutError
from stenograph.judges import Judge
from stenograph.rollouts.client import GatewayClient
from stenograph.types import Outcome, Rollout, RolloutStatus, Task

STDERR_TAIL = 500


@dataclass(slots=True, eq=False)
class Attempts:
    """Runs attempts, at most `max_concurrent` at a time. `changed` hears of each that begins or ends.

    An agent that fails or runs out of time earns 0 unjudged: as far as anyone can tell, it is the policy's doing.
    Where a part of ours fails (gateway, judge, starting the agent) there is no reward, and nobody learns from it.
    """

    gateway: GatewayClient
    agent: Agent
    judge: Judge
    max_concurrent: int
    changed: Callable[[int], None] = lambda running: None
    _free: asyncio.Semaphore = field(init=False)
    _running: int = 0

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.max_concurrent)

    async def run_all(self, attempts: list[tuple[Task, str]], *, traced: bool = True) -> list[Rollout]:
        """Run (task, group id) pairs; answers in their order. What is no RolloutError ends them all."""
        running: list[asyncio.Task[Rollout]] = []
        try:
            async with asyncio.TaskGroup() as group:
                running += [group.create_task(self.run(task, group_id, traced=traced)) for task, group_id in attempts]
        except BaseException as e:
            await self.discard(task.result() for task in running if not task.cancelled() and not task.exception())
            raise (e.exceptions[0] if isinstance(e, ExceptionGroup) else e) from None
        return [task.result() for task in running]

    async def discard(self, rollouts: Iterable[Rollout]) -> None:
        """Release the sessions of attempts that nobody will train on; a gateway that is gone holds none any more."""
        with suppress(RolloutError):
            await self.gateway.release(rollout.session for rollout in rollouts if rollout.session)

    async def run(self, task: Task, group_id: str, *, traced: bool = True) -> Rollout:
        """One attempt. Untraced ones (evaluation) leave no session behind."""
        async with self._free:
            self._change(1)
            try:
                return await self._attempt(task, group_id, traced)
            finally:
                self._change(-1)

    async def _attempt(self, task: Task, group_id: str, traced: bool) -> Rollout:
        started = time.monotonic()
        rollout = Rollout("rollout_" + secrets.token_hex(8), group_id, task, "", None, "error")
        metadata = {"rollout_id": rollout.id, "group_id": group_id, "task_id": task.id}
        try:
            session = await self.gateway.open(traced=traced, metadata=metadata)
            rollout = replace(rollout, session=session.id)
            async with self._kept(session.id):
                rollout = await self._scored(rollout, session)
                if traced:
                    rollout = await self._sealed(rollout)
                else:
                    await self.gateway.release([session.id])
        except RolloutError as e:
            rollout = _failed(rollout, e)
        return replace(rollout, seconds=time.monotonic() - started)

    @asynccontextmanager
    async def _kept(self, session: str) -> AsyncIterator[None]:
        """Delete the session where the block is cancelled, or meets what ends the run: nobody will train on it."""
        try:
            yield
        except RolloutError:
            raise
        except BaseException:
            with suppress(RolloutError):
                await self.gateway.release([session])
            raise

    async def _scored(self, rollout: Rollout, session: SessionHandle) -> Rollout:
        try:
            async with self.agent.run(rollout.task, session) as outcome:
                status, error = _status(outcome)
                if status != "completed":
                    return replace(rollout, reward=0.0, status=status, error=error)
                num_turns = await self.gateway.num_turns(session.id)
                judgement = await self.judge(rollout.task, replace(outcome, num_turns=num_turns))
        except RolloutError as e:
            return _failed(rollout, e)
        parts, turn_rewards = dict(judgement.parts), judgement.turn_rewards
        return replace(rollout, reward=judgement.reward, parts=parts, turn_rewards=turn_rewards, status=status)

    async def _sealed(self, rollout: Rollout) -> Rollout:
        """How many turns there are is known for sure once the session takes no more of them."""
        session, status = rollout.session, rollout.status
        try:
            await self.gateway.seal(session, reward=rollout.reward, status=status, turn_rewards=rollout.turn_rewards)
        except JudgeError as e:
            rollout = _failed(rollout, e)
            await self.gateway.seal(session, reward=None, status=rollout.status)
        return rollout

    def _change(self, by: int) -> None:
        self._running += by
        self.changed(self._running)


def _failed(rollout: Rollout, error: RolloutError) -> Rollout:
    told = f"{rollout.error}; {error}" if rollout.error else str(error)
    return replace(rollout, reward=None, parts={}, turn_rewards=(), status="error", error=told)


def _status(outcome: Outcome) -> tuple[RolloutStatus, str | None]:
    tail = outcome.stderr.strip()[-STDERR_TAIL:]
    if outcome.exit_code is None:
        return "timeout", f"the agent was stopped after {outcome.seconds:.0f} s; {tail}"
    if outcome.exit_code != 0:
        return "agent_failed", f"the agent exited with {outcome.exit_code}: {tail}"
    return "completed", None
