"""Agent protocols: pure functions between wire JSON and the records."""
