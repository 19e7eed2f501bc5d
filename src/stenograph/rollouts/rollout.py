"""One attempt: its session is sealed whatever happens, and a failure stays its own."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from stenograph.agents.base import Agent
from stenograph.errors import StenographError
from stenograph.judges import Judge
from stenograph.rollouts.client import GatewayClient
from stenograph.types import Outcome, Rollout, RolloutStatus, Task

STDERR_TAIL = 500


@dataclass(slots=True, eq=False)
class Attempts:
    """Runs attempts, at most `max_concurrent` at a time. `changed` hears of each that begins or ends."""

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
        """Run (task, group id) pairs; answers in their order."""
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self.run(task, group_id, traced=traced)) for task, group_id in attempts]
        return [task.result() for task in running]

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
        id = "rollout_" + secrets.token_hex(8)
        metadata = {"rollout_id": id, "group_id": group_id, "task_id": task.id}
        reward: float | None = None
        status: RolloutStatus = "error"
        error: str | None = None
        parts = {}
        session = ""
        try:
            handle = await self.gateway.open(traced=traced, metadata=metadata)
            session = handle.id
            async with self.agent.run(task, handle) as outcome:
                status, error = _status(outcome)
                reward = 0.0
                if status == "completed":
                    judgement = await self.judge(task, outcome)
                    reward, parts = judgement.reward, dict(judgement.parts)
        except StenographError as e:
            # Our own parts failed, not the agent: no reward, so that nobody learns from it.
            status, error, reward = "error", str(e), None
        finally:
            if session:
                error = await self._close(session, reward, status, traced) or error
        seconds = time.monotonic() - started
        return Rollout(id, group_id, task, session, reward, status, error, parts, seconds)

    async def _close(self, session: str, reward: float | None, status: str, traced: bool) -> str | None:
        try:
            if traced:
                await self.gateway.seal(session, reward=reward, status=status)
            else:
                await self.gateway.delete(session)
        except StenographError as e:
            return str(e)
        return None

    def _change(self, by: int) -> None:
        self._running += by
        self.changed(self._running)


def _status(outcome: Outcome) -> tuple[RolloutStatus, str | None]:
    """What an agent's end means. A failed agent earns 0: it is the policy's doing, as far as anyone can tell."""
    tail = outcome.stderr.strip()[-STDERR_TAIL:]
    if outcome.exit_code is None:
        return "timeout", f"the agent was stopped after {outcome.seconds:.0f} s; {tail}"
    if outcome.exit_code != 0:
        return "agent_failed", f"the agent exited with {outcome.exit_code}: {tail}"
    return "completed", None
