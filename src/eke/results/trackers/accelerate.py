"""Mirror through Accelerate's trackers: TensorBoard, MLflow, Trackio. Tested with accelerate 1.15.

Accelerate's classes ask its process state, and making that state starts communication with other
ranks. So nothing of theirs is touched before the worker has made it: the run is started by its
first row, when training is under way.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from eke.common.files import own_folder
from eke.common.paths import RunPaths
from eke.plan.record import metrics
from eke.results.trackers.async_tracker import EVAL, TRAIN, CatchUp, Mirror, MirrorError
from eke.results.trackers.tracker import Row, TrackedRun, Value

_log = logging.getLogger(__name__)

LIBRARIES = ("mlflow", "alembic", "trackio", "tensorboard")
"""Loggers that report every step; silenced in the run's log."""


class TrackerBackend(Protocol):
    """What differs between Accelerate's trackers; a subclass needs `package` and `start`."""

    package: str
    """Imported package, and name of its folder in the run folder."""

    def prepare(self, run: TrackedRun, folder: Path) -> None:
        """Set the environment and import, on the worker's own thread."""
        ...

    def start(self, run: TrackedRun, folder: Path, first_step: int) -> tuple[Any, dict[str, int]]:
        """Start Accelerate's tracker; returns it with the last steps of earlier attempts."""
        ...

    def log(self, tracker: Any, rows: Sequence[Row]) -> None:
        """Log each row at its step, which is the x axis and no value."""
        for row in rows:
            values = {key: value for key, value in row.items() if key != metrics.STEP}
            tracker.log(values, step=int(row[metrics.STEP]))

    def summary(self, tracker: Any, values: Row, last_step: int) -> None:
        """Log values of the whole run under `summary/`, at the last step."""
        tracker.log({f"summary/{key}": value for key, value in values.items()}, step=last_step)

    def finish(self, tracker: Any, exit_code: int) -> None:
        """Close; raises if rows are known to be missing."""
        ...


class TensorBoardBackend(TrackerBackend):
    """Event files of torch's writer in `tensorboard/<run_id>`; each attempt adds one."""

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
        return tracker, {TRAIN: first_step - 1, EVAL: first_step - 1}

    def finish(self, tracker: Any, exit_code: int) -> None:
        """Flush and close."""
        tracker.log({"summary/exit_code": exit_code}, step=0)
        tracker.finish()


class AccelerateRun(Mirror):
    """One attempt of a run in one of Accelerate's trackers."""

    def __init__(self, run: TrackedRun, backend: TrackerBackend) -> None:
        self._run = run
        self._backend = backend
        self._folder = run.directory / backend.package
        self._tracker: Any = None
        self._last_step = 0
        self._catch_up = CatchUp(RunPaths(run.directory).metrics, run.attempt)

    def prepare(self) -> None:
        """Import the library.

        Raises:
            MirrorError: it is not installed.
            OSError: its folder cannot be made.
        """
        package = self._backend.package
        own_folder(self._folder)
        try:
            self._backend.prepare(self._run, self._folder)
        except ModuleNotFoundError as error:
            raise MirrorError(
                f'the package {error.name} is not installed -> pip install "eke[{package}]"'
            ) from None
        for name in LIBRARIES:
            logging.getLogger(name).setLevel(logging.WARNING)

    def log(self, rows: Sequence[Row]) -> None:
        """Every row at its training step, each once even when a step is repeated."""
        if rows and self._tracker is None:
            self._start(int(rows[0][metrics.STEP]))
        missing = self._catch_up.missing(rows)
        if missing:
            self._last_step = int(missing[-1][metrics.STEP])
            self._backend.log(self._tracker, missing)

    def summary(self, values: Row) -> None:
        """Values of the whole run, as each library can show them."""
        self._ensure()
        self._backend.summary(self._tracker, values, self._last_step)

    def close(self, exit_code: int) -> None:
        """Close the run.

        Raises:
            MirrorError: rows are missing.
        """
        self._ensure()
        self._backend.finish(self._tracker, exit_code)

    def _ensure(self) -> None:
        """Start a run that has no row; only the worker's own state makes that safe."""
        if self._tracker is not None:
            return
        from accelerate.state import is_initialized

        if not is_initialized():
            raise MirrorError("the run ended before its first step; there is nothing to show")
        self._start(0)

    def _start(self, first_step: int) -> None:
        self._tracker, self._catch_up.seen = self._backend.start(
            self._run, self._folder, first_step
        )


def flat_config(run: TrackedRun) -> dict[str, Value]:
    """Factors at the top and the configuration's keys by their path: `cfg.optimizer.lr`."""
    return {**run.factors, **dict(_flatten("cfg", run.config))}


def _flatten(path: str, value: Any) -> list[tuple[str, Value]]:
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _flatten(f"{path}.{key}", item)]
    if isinstance(value, bool | int | float | str):
        return [(path, value)]
    return [(path, json.dumps(value, default=str))]  # null, lists
