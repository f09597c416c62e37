"""Sweeps: what varies, which runs that makes, which of them are left out."""

from eke.config.sweep.definition import Excluded, Expanded, SweepCell, expand

__all__ = ["Excluded", "Expanded", "SweepCell", "expand"]
