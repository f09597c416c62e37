"""Plan: every derived decision, the identity of a run, and its record."""
