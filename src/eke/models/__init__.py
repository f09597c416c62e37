"""Models: families, sizes, checkpoints; no torch."""
