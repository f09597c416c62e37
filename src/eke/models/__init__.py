"""Model families, sizes and checkpoints, without torch."""
