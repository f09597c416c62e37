"""Optimizers: builders, learning-rate schedules, parameter groups and optimizer steps."""
