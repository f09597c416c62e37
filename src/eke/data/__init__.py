"""Data sources and prepared tokens, without torch."""
