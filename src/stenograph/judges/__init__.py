"""Scoring outcomes."""
