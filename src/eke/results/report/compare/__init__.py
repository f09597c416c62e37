"""Records -> one comparison: what differs, by how much, and how sure that is."""

from eke.results.report.compare.comparison import (
    Comparison,
    ComparisonRow,
    OneMachine,
    compare_runs,
)
