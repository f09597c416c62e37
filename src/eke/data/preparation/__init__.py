"""Tokenization in a separate process; the only package that imports `datasets`."""
