"""eke: find, run and compare the training recipes that get the most out of the GPUs you have."""

__version__ = "0.1.0"
