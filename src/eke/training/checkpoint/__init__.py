"""Checkpoints: saving, loading, pruning."""
