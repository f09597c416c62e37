"""Tokenization in a separate process. Only this package imports `datasets`."""
