"""The agent that the config names, checked before a run starts."""

from __future__ import annotations

import shutil
import sys

from stenograph.agents.base import Agent
from stenograph.agents.local import CommandAgent
from stenograph.agents.remote import CallableAgent, UrlAgent
from stenograph.config import AgentConfig
from stenograph.errors import ConfigError
from stenograph.imports import load_callable


def load_agent(config: AgentConfig) -> Agent:
    """Raises ConfigError where the command or the callable is not there."""
    if config.command:
        return CommandAgent(_resolved(config.command), config)
    if config.callable is not None:
        return CallableAgent(load_callable(config.callable, "agent.callable"), config.timeout_s)
    if config.url is not None:
        return UrlAgent(config.url, config.timeout_s)
    raise ConfigError("[agent] names no agent; set command, callable or url")


def _resolved(command: tuple[str, ...]) -> tuple[str, ...]:
    """`python` is the interpreter that runs us, so that the agent sees the same packages."""
    program = sys.executable if command[0] in ("python", "python3") else shutil.which(command[0])
    if program is None:
        raise ConfigError(f"agent.command: {command[0]!r} is not found on PATH; install it or give its path")
    return (program, *command[1:])
