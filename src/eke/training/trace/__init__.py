"""What a plan's memory will be: the run's own builders, traced on tensors without data."""
