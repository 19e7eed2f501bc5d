"""Where work comes from: a reasoning-gym dataset, a JSONL file, a callable."""

from stenograph.tasks.loading import load_tasks
from stenograph.tasks.order import tasks_for_step

__all__ = ["load_tasks", "tasks_for_step"]
