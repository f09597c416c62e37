"""Tokenizing data once, in a process of its own: the only place that imports `datasets`."""
