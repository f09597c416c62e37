"""Results: reports and trackers.

Input: records and metrics of run folders. Output: comparisons as text, page, Markdown, JSON, CSV
and W&B report, and rows sent to trackers. Begin with `report` and `trackers`.
"""
