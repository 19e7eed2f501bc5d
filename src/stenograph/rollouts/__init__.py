"""Attempts at tasks, in groups, ahead of the trainer by at most max_staleness."""

from stenograph.rollouts.batches import Batch, batches
from stenograph.rollouts.client import GatewayClient
from stenograph.rollouts.evaluation import evaluate
from stenograph.rollouts.rollout import Attempts

__all__ = ["Attempts", "Batch", "GatewayClient", "batches", "evaluate"]
