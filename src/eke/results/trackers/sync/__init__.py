"""Upload of runs to W&B (`eke sync`), rebuilt from metrics.jsonl and record.json.

W&B's offline files are not used: they can be torn or empty, and `wandb sync` exits with 0 even if
nothing arrived; see docs/explanation/tracking.md.
"""

from eke.results.trackers.sync.send import FoundRun, Options, Report, SyncOutcome, find_runs, sync

__all__ = ["FoundRun", "Options", "Report", "SyncOutcome", "find_runs", "sync"]
