"""The agent that the config names, checked before a run starts."""

from __future__ import annotations

import inspect

from stenograph.agents.base import Agent
from stenograph.agents.local import CommandAgent
from stenograph.agents.remote import CallableAgent, Solve, UrlAgent
from stenograph.config import AgentConfig
from stenograph.errors import ConfigError
from stenograph.imports import load_callable
from stenograph.processes import resolve_command


def load_agent(config: AgentConfig) -> Agent:
    """Raises ConfigError where the command or the callable is not there."""
    if config.command:
        return CommandAgent(resolve_command(config.command, "agent.command"), config)
    if config.callable is not None:
        return CallableAgent(_async(config.callable), config.timeout_s)
    if config.url is not None:
        return UrlAgent(config.url, config.timeout_s)
    raise ConfigError("[agent] names no agent; set command, callable or url")


def _async(name: str) -> Solve:
    solve = load_callable(name, "agent.callable")
    if not (inspect.iscoroutinefunction(solve) or inspect.iscoroutinefunction(type(solve).__call__)):
        raise ConfigError(f"agent.callable: {name} is not async; write `async def`")
    return solve
