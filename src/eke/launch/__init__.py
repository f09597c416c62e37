"""Launchers: start plans as processes, without torch."""
