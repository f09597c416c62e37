"""Results: reports and trackers."""
