"""Trackio, on this machine only. Tested with trackio 0.43.

Its store is SQLite with a write-ahead log: for a local disk, not for NFS.
"""

import os
from pathlib import Path
from typing import Any

from eke.results.trackers.accelerate import TrackerBackend, flat_config
from eke.results.trackers.async_tracker import EVAL, TRAIN, MirrorError
from eke.results.trackers.tracker import Row, TrackedRun

OUTSIDE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL", "TRACKIO_DATASET_ID")
"""Variables that enable uploads; removed."""


class TrackioBackend(TrackerBackend):
    """The run `<run_id>` of the project `tracker.project`, in `trackio` below the run folder."""

    package = "trackio"

    def __init__(self) -> None:
        self._rows = 0

    def prepare(self, run: TrackedRun, folder: Path) -> None:
        """Set the folder, which trackio reads on import, and import it."""
        os.environ.setdefault("TRACKIO_DIR", str(folder.absolute()))
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        for name in OUTSIDE:
            os.environ.pop(name, None)
        import trackio  # noqa: F401  # trackio 0.43: imported for its effect

    def start(self, run: TrackedRun, folder: Path, first_step: int) -> tuple[Any, dict[str, int]]:
        """Start the run, or continue an existing one."""
        from accelerate.tracking import TrackioTracker
        from trackio.sqlite_storage import SQLiteStorage

        project = run.settings.project
        tracker = TrackioTracker(
            project,
            name=run.run_id,
            group=run.settings.group or run.group,
            config={"name": run.name, "notes": run.notes, **flat_config(run)},
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # sampling would disturb what is measured
            auto_log_cpu=False,
        )
        tracker.start()
        last = SQLiteStorage.get_last_step(project, run_id=tracker.run.id)
        self._rows = SQLiteStorage.get_log_count(project, run_id=tracker.run.id)
        log = tracker.log

        def counted(values: Row, step: int) -> None:
            self._rows += 1
            log(values, step=step)

        tracker.log = counted
        return tracker, {} if last is None else {TRAIN: int(last), EVAL: int(last)}

    def finish(self, tracker: Any, exit_code: int) -> None:
        """Wait for the writer and count rows: Trackio does not report a full disk.

        Raises:
            MirrorError: rows are missing.
        """
        from trackio.sqlite_storage import SQLiteStorage

        tracker.finish()
        written = SQLiteStorage.get_log_count(tracker.run.project, run_id=tracker.run.id)
        if written != self._rows:
            raise MirrorError(
                f"Trackio's file holds {written} of {self._rows} rows: is the disk full?"
            )
