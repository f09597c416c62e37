"""Processes of runs and sweeps: start, supervise, follow, collect."""
