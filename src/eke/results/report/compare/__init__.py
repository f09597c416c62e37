"""Comparison of records: differences, their sizes and their intervals."""

from eke.results.report.compare.comparison import (
    Comparison,
    ComparisonRow,
    MachineComparison,
    compare_runs,
)
