"""Where work comes from."""
