"""From records to what people read; needs neither torch nor Hydra."""

from eke.report.cells import differing, render_cells
from eke.report.summary import render_summary

__all__ = ["differing", "render_cells", "render_summary"]
