"""From records to what people read; needs neither torch nor Hydra."""

from eke.report.summary import render_summary

__all__ = ["render_summary"]
