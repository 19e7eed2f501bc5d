"""Scoring outcomes."""

from stenograph.judges.loading import Judge, load_judge

__all__ = ["Judge", "load_judge"]
