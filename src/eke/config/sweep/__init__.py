"""Sweeps: what varies, which runs that makes, which of them are left out."""

from eke.config.sweep.expand import Excluded, Expanded, SweepCell, expand

__all__ = ["Excluded", "Expanded", "SweepCell", "expand"]
