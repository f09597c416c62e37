"""Weights & Biases report of a comparison: built offline, published on request.

wandb is imported only when a report is built. Tested with wandb 0.31 and wandb-workspaces 0.4.13.
Design decisions: docs/explanation/tracking.md.
"""
