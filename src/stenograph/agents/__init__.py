"""Running agent programs."""

from stenograph.agents.base import Agent, SessionHandle
from stenograph.agents.loading import load_agent

__all__ = ["Agent", "SessionHandle", "load_agent"]
