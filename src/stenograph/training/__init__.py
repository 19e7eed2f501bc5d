"""Models, packing, optimizer steps, weight publishing."""
