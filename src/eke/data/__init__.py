"""Data: sources and prepared tokens; no torch."""
