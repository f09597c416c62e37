"""Launchers: from plans to processes, without torch."""
