"""Advantages and losses: pure functions on flat tensors."""
