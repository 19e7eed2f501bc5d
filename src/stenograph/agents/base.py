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


def addresses(session: SessionHandle) -> dict[str, str]:
    """The environment in which the clients of every protocol find the session."""
    return {
        "OPENAI_BASE_URL": session.base_url + "/v1",
        "OPENAI_API_KEY": session.api_key,
        "OPENAI_MODEL": session.model,
        "ANTHROPIC_BASE_URL": session.base_url,
        "ANTHROPIC_API_KEY": session.api_key,
        "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",  # it says then what each of its requests is for
    }


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
