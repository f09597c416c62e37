"""Memory trace: a plan's training step on fake tensors, built as in a run."""
