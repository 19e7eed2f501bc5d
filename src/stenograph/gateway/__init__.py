"""The HTTP server that agents talk to."""
