"""A comparison as a report of Weights & Biases: built offline, saved there when asked.

Nothing of W&B's is imported before a report is built. Tested with wandb 0.31 and wandb-workspaces
0.4.13. What was decided: docs/explanation/tracking.md.
"""
