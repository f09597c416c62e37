"""Estimates: memory and time of a plan."""
