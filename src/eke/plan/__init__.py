"""Plans with every derived decision, identities of runs, and records."""
