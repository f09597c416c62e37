"""Training: model, optimizer, batches, distribution, loop, checkpoints, trace of memory."""
