"""Optimizers: builders, learning-rate schedules, parameter groups and the update of a step."""
