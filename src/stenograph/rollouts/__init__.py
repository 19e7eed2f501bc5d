"""Attempts at tasks, in groups, ahead of the trainer by at most max_staleness."""
