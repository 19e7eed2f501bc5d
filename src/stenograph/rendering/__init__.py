"""Conversation <-> token ids."""
