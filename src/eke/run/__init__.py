"""The worker: trains one plan, measures, and leaves a record."""
