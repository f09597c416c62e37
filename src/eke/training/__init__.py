"""Training: model, optimizer, batches, distribution, loop, checkpoints, memory traces."""
