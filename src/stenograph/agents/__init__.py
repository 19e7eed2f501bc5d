"""Running agent programs."""
