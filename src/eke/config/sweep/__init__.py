"""Sweeps: definition, expansion into runs, and exclusion of runs."""

from eke.config.sweep.definition import Expanded, SweepCell, expand
