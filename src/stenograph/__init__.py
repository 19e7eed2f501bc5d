"""Stenograph: train LLM agents by reinforcement learning on the exact tokens they produced."""

__version__ = "0.1.0"
