"""From records to what people read; needs neither torch nor Hydra."""

from eke.results.report.cells import label_cells, render_cells
from eke.results.report.planning import PlanningLine
from eke.results.report.summary import render_summary

__all__ = ["PlanningLine", "label_cells", "render_cells", "render_summary"]
