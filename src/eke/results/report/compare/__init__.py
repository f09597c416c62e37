"""Records -> one comparison: what differs, by how much, and how sure that is."""

from eke.results.report.compare.comparison import Comparison, OneMachine, Row, compare

__all__ = ["Comparison", "OneMachine", "Row", "compare"]
