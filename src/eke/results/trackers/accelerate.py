"""Mirror through Accelerate's trackers: TensorBoard, MLflow, Trackio. Tested with accelerate 1.15.

Accelerate's classes ask its process state, and making that state starts communication with other
ranks. So nothing of theirs is touched before the worker has made it: the run is started by its
first row, when training is under way.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from eke.common.files import own_folder, read_json, write_json
from eke.common.paths import RunPaths
from eke.plan.record import EXIT_OK, EXIT_RESUMABLE, metrics
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


MLFLOW_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",  # sampling would disturb what is measured
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}
MLFLOW_OUTSIDE = ("MLFLOW_RUN_ID", "MLFLOW_NESTED_RUN", "MLFLOW_TAGS", "MLFLOW_EXPERIMENT_NAME")
"""Variables that Accelerate puts above its arguments: they would merge runs of a sweep."""

REMOTE = ("http://", "https://", "databricks")
"""Beginnings of URIs whose server keeps the artifacts."""

BATCH = 1000
"""Metrics that MLflow takes in one call: MAX_METRICS_PER_BATCH of mlflow/utils/validation.py."""


class MLflowBackend(TrackerBackend):
    """A run of the experiment `tracker.project`; MLflow makes its id, a file keeps it.

    The store is SQLite below the run folder, or a server. Tested with mlflow 3.17.
    """

    package = "mlflow"

    def prepare(self, run: TrackedRun, folder: Path) -> None:
        """Disable telemetry and terminal output, then import."""
        os.environ.update(MLFLOW_ENVIRONMENT)
        for name in MLFLOW_OUTSIDE:
            os.environ.pop(name, None)
        import mlflow

        mlflow.set_tracking_uri(store_uri(run, folder))

    def start(self, run: TrackedRun, folder: Path, first_step: int) -> tuple[Any, dict[str, int]]:
        """Start the run, or continue one in the same store."""
        import mlflow
        from accelerate.tracking import MLflowTracker

        uri, file = store_uri(run, folder), folder / "run.json"
        known = read_json(file) if file.exists() else {}
        store = hashlib.sha256(uri.encode()).hexdigest()[:16]  # the URI may hold a password
        run_id = known.get("run_id") if known.get("store") == store else None
        own = (folder / "artifacts").absolute().as_uri()
        artifacts = None if uri.startswith(REMOTE) else own
        tracker = MLflowTracker(
            run.settings.project, artifacts, run_id=run_id, run_name=run.name or run.run_id
        )
        tracker.start()
        if run_id is not None:
            client, keys = mlflow.MlflowClient(), {TRAIN: metrics.LOSS, EVAL: metrics.EVAL_LOSS}
            logged = {kind: client.get_metric_history(run_id, key) for kind, key in keys.items()}
            return tracker, {
                kind: max(each.step for each in points) for kind, points in logged.items() if points
            }
        tracker.store_init_configuration(flat_config(run))
        group = run.settings.group or run.group
        tags = {"run_id": run.run_id, "command": run.notes, "group": group}
        mlflow.set_tags({f"eke.{key}": value for key, value in tags.items() if value})
        write_json(file, {"store": store, "run_id": tracker.active_run.info.run_id})
        return tracker, {}

    def log(self, tracker: Any, rows: Sequence[Row]) -> None:
        """All numbers in one transaction: through `log_metrics` every row would be one."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        points = [
            Metric(key, value, now, int(row[metrics.STEP]))
            for row in rows
            for key, value in row.items()
            if key != metrics.STEP and not isinstance(value, str)
        ]
        client, run_id = MlflowClient(), tracker.active_run.info.run_id
        for start in range(0, len(points), BATCH):
            client.log_batch(run_id, metrics=points[start : start + BATCH])

    def summary(self, tracker: Any, values: Row, last_step: int) -> None:
        """Log numbers as metrics under `summary/`, texts as tags `eke.`."""
        import mlflow

        words = {f"eke.{key}": value for key, value in values.items() if isinstance(value, str)}
        rest = {f"summary/{k}": v for k, v in values.items() if not isinstance(v, str)}
        mlflow.set_tags(words)
        tracker.log(rest, step=last_step)

    def finish(self, tracker: Any, exit_code: int) -> None:
        """Set MLflow's status for the outcome."""
        import mlflow

        status = {EXIT_OK: "FINISHED", EXIT_RESUMABLE: "KILLED"}.get(exit_code, "FAILED")
        mlflow.end_run(status)


def store_uri(run: TrackedRun, folder: Path) -> str:
    """`tracker.uri`, else MLflow's own variable, else a file of this run's."""
    local = f"sqlite:///{(folder / 'mlflow.db').absolute()}"
    return run.settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or local


TRACKIO_OUTSIDE = (
    "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL", "TRACKIO_DATASET_ID",
)  # fmt: skip
"""Variables that enable uploads; removed."""


class TrackioBackend(TrackerBackend):
    """The run `<run_id>` of the project `tracker.project`, in `trackio` below the run folder.

    Tested with trackio 0.43. Its store, SQLite with a write-ahead log, is for a local disk.
    """

    package = "trackio"

    def __init__(self) -> None:
        self._rows = 0

    def prepare(self, run: TrackedRun, folder: Path) -> None:
        """Set the folder, which trackio reads on import, and import it."""
        os.environ.setdefault("TRACKIO_DIR", str(folder.absolute()))
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        for name in TRACKIO_OUTSIDE:
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
        """Wait for the writer and count rows: Trackio does not report a full disk."""
        from trackio.sqlite_storage import SQLiteStorage

        tracker.finish()
        written = SQLiteStorage.get_log_count(tracker.run.project, run_id=tracker.run.id)
        if written != self._rows:
            raise MirrorError(
                f"Trackio's file holds {written} of {self._rows} rows: is the disk full?"
            )


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
        """Import the library; raises MirrorError if it is not installed."""
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
        if missing := self._catch_up.missing(rows):
            self._last_step = int(missing[-1][metrics.STEP])
            self._backend.log(self._tracker, missing)

    def summary(self, values: Row) -> None:
        """Values of the whole run, as each library can show them."""
        self._ensure()
        self._backend.summary(self._tracker, values, self._last_step)

    def close(self, exit_code: int) -> None:
        """Close the run; raises MirrorError if rows are missing."""
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
        started = self._backend.start(self._run, self._folder, first_step)
        self._tracker, self._catch_up.seen = started


def flat_config(run: TrackedRun) -> dict[str, Value]:
    """Factors at the top and the configuration's keys by their path: `cfg.optimizer.lr`."""
    return {**run.factors, **dict(_flatten("cfg", run.config))}


def _flatten(path: str, value: Any) -> list[tuple[str, Value]]:
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _flatten(f"{path}.{key}", item)]
    if isinstance(value, bool | int | float | str):
        return [(path, value)]
    return [(path, json.dumps(value, default=str))]  # null, lists
