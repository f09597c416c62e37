"""Reports of records; imports neither torch nor Hydra."""

from eke.results.report.summary import (
    PlanningLine,
    describe_factors,
    label_cells,
    render_summary,
    shared_overrides,
)
