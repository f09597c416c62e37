"""TensorBoard, through torch's writer: event files below the run folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eke.results.trackers.accelerate import flat_config, log_each
from eke.results.trackers.tracker import Row, TrackedRun


class TensorBoardBackend:
    """Event files in `tensorboard/<run_id>`; each attempt adds one."""

    package = "tensorboard"

    def prepare(self, run: TrackedRun, folder: Path) -> None:
        """Import torch's writer, which needs the package tensorboard."""
        import torch.utils.tensorboard  # noqa: F401  # torch 2.13: imported for its effect

    def start(self, run: TrackedRun, folder: Path, first_step: int) -> tuple[Any, dict[str, int]]:
        """Start the writer; readers ignore earlier events from `first_step` on."""
        from accelerate.tracking import TensorBoardTracker

        resumed = {"purge_step": first_step} if run.attempt else {}
        tracker = TensorBoardTracker(run.run_id, logging_dir=folder, **resumed)
        tracker.start()
        if not list(Path(tracker.logging_dir).glob("*/hparams.yml")):
            tracker.store_init_configuration(flat_config(run))
            tracker.writer.add_text("notes", run.notes, global_step=0)
        # Reading event files is slow; all rows before this attempt are on disk.
        return tracker, {"train": first_step - 1, "eval": first_step - 1}

    def log(self, tracker: Any, rows: Sequence[Row]) -> None:
        """Every value of every row."""
        log_each(tracker, rows)

    def summary(self, tracker: Any, values: Row, last_step: int) -> None:
        """Scalars and texts under `summary/`, at the last step."""
        tracker.log({f"summary/{key}": value for key, value in values.items()}, step=last_step)

    def finish(self, tracker: Any, exit_code: int) -> None:
        """Flush and close."""
        tracker.log({"summary/exit_code": exit_code}, step=0)
        tracker.finish()
