"""Loop: worker, steps, evaluation, measurement, results."""
