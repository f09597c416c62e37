"""Estimates of a plan's memory and time."""
