"""`eke sync`: runs from their folders to W&B, rebuilt from metrics.jsonl and record.json.

W&B's own offline files are not read: they can be torn or empty, and `wandb sync` answers 0 when
nothing arrived. Why: docs/explanation/tracking.md.
"""

from eke.results.trackers.sync.send import Found, Options, Report, Verdict, find_runs, sync

__all__ = ["Found", "Options", "Report", "Verdict", "find_runs", "sync"]
