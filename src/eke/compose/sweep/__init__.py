"""Sweeps: what varies, which runs that makes, which of them are left out."""

from eke.compose.sweep.expand import Excluded, Expanded, SweepCell, expand

__all__ = ["Excluded", "Expanded", "SweepCell", "expand"]
