"""Reports of records; imports neither torch nor Hydra."""

from eke.results.report.summary import PlanningLine, label_cells, render_cells, render_summary
