"""Sweeps: definition, expansion into runs, and exclusion of runs."""

from eke.config.sweep.definition import Excluded, Expanded, SweepCell, expand

__all__ = ["Excluded", "Expanded", "SweepCell", "expand"]
