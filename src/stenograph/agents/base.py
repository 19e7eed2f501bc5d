"""The seam to an agent program: whatever it does, a crash or a timeout included, is an Outcome."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from stenograph.types import Outcome, Task


@dataclass(frozen=True, slots=True)
class SessionHandle:
    """What an agent needs to call its model. `base_url` has no /v1."""

    id: str
    base_url: str
    api_key: str
    model: str


def visible(task: Task) -> dict[str, Any]:
    """What an agent may know of its task. The answer and the judge stay out, and of `data` what begins with "_".

    An agent with a shell could read the solution otherwise, and would be rewarded for it.
    """
    data = {name: value for name, value in task.data.items() if not str(name).startswith("_")}
    return {"id": task.id, "prompt": task.prompt, "data": data, "sandbox": task.sandbox}


class Agent(Protocol):
    """Runs one attempt. `outcome.workdir` lives as long as the context: judge inside.

    `exit_code` is None after a timeout, and not 0 after a failure. Raises AgentError where it could not be started.
    """

    def run(self, task: Task, session: SessionHandle) -> AbstractAsyncContextManager[Outcome]: ...
