"""Mirrors through Accelerate's trackers: TensorBoard, MLflow, Trackio. Tested with accelerate 1.15.

Accelerate's classes read its process state, and creating that state starts communication with other
ranks. So the first row starts the tracker, after the worker has created the state.
"""

import fcntl
import hashlib
import json
import logging
import os
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from eke.common.files import make_private_dir, open_file, read_json, write_json
from eke.common.paths import RunPaths
from eke.plan.record import EXIT_OK, EXIT_RESUMABLE, metrics
from eke.results.trackers.async_tracker import (
    EVAL,
    TRAIN,
    MirrorError,
    MissingRowFilter,
    TrackerClient,
    drawn,
)
from eke.results.trackers.tracker import Row, TrackedRun, Value


class _AccelerateRun(TrackerClient):
    """One attempt of a run in one of Accelerate's trackers, which `start` stores in `_tracker`."""

    package: str
    """Name of the imported package and of its folder in the run folder."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._folder = run.directory / self.package
        self._tracker: Any = None
        self._last_step = 0
        self._catch_up = MissingRowFilter(RunPaths(run.directory).metrics, run.attempt)

    @abstractmethod
    def load(self) -> None:
        """Set the environment and import the library, on the worker's thread."""

    @abstractmethod
    def start(self, first_step: int) -> dict[str, int]:
        """Start Accelerate's tracker, and return the last steps of earlier attempts."""

    def prepare(self) -> None:
        """Import the library. Raise MirrorError if it is not installed."""
        make_private_dir(self._folder)
        try:
            self.load()
        except ModuleNotFoundError as error:
            fix = f'pip install "eke[{self.package}]"'
            raise MirrorError(f"the package {error.name} is not installed -> {fix}") from None
        for name in ("mlflow", "alembic", "trackio", "tensorboard"):  # they report every step
            logging.getLogger(name).setLevel(logging.WARNING)

    def log(self, rows: Sequence[Row]) -> None:
        """Send each row once, also if a step is repeated."""
        if rows and self._tracker is None:
            self._catch_up.seen = self.start(int(rows[0][metrics.STEP]))
        if missing := self._catch_up.missing(rows):
            self._last_step = int(missing[-1][metrics.STEP])
            self.send(missing)

    def send(self, rows: Sequence[Row]) -> None:
        """Log each row at its step."""
        for row in rows:
            values = {key: value for key, value in drawn(row).items() if key != metrics.STEP}
            self._tracker.log(values, step=int(row[metrics.STEP]))

    def summary(self, values: Row) -> None:
        """Log values of the entire run under `summary/`, at the last step."""
        self._ensure()
        named = {f"summary/{key}": value for key, value in values.items()}
        self._tracker.log(named, step=self._last_step)

    def _ensure(self) -> None:
        """Start a run without rows if the worker has created Accelerate's state."""
        if self._tracker is not None:
            return
        from accelerate.state import is_initialized

        if not is_initialized():
            raise MirrorError("the run ended before its first step")
        self._catch_up.seen = self.start(0)  # last steps of earlier attempts, not to be sent again

    def _config(self) -> dict[str, Value]:
        """Return factors, and the configuration's keys by their path: `cfg.optimizer.lr`."""
        return {**self._run.factors, **_flatten("cfg", self._run.config)}


def _flatten(path: str, value: Any) -> dict[str, Value]:
    if isinstance(value, Mapping):
        inner = [_flatten(f"{path}.{key}", item) for key, item in value.items()]
        return {key: item for each in inner for key, item in each.items()}
    is_plain = isinstance(value, bool | int | float | str)
    return {path: value if is_plain else json.dumps(value, default=str)}  # null, lists


class TensorBoardRun(_AccelerateRun):
    """Event files of torch's writer in `tensorboard/<run_id>`, one for each attempt."""

    package = "tensorboard"

    def load(self) -> None:
        """Import torch's writer, which needs the package tensorboard."""
        import torch.utils.tensorboard  # noqa: F401  # torch 2.13: imported for its effect

    def start(self, first_step: int) -> dict[str, int]:
        """Start the writer. Readers ignore earlier events from `first_step` on."""
        from accelerate.tracking import TensorBoardTracker

        run = self._run
        resumed = {"purge_step": first_step} if run.attempt else {}
        self._tracker = TensorBoardTracker(run.run_id, logging_dir=self._folder, **resumed)
        self._tracker.start()
        self._tracker.writer.add_text("notes", run.notes, global_step=0)
        # Reading event files is slow. All rows before this attempt are on disk.
        return dict.fromkeys((TRAIN, EVAL), first_step - 1)

    def summary(self, values: Row) -> None:
        """Log texts, and numbers as metrics of the tab HParams with `told` as parameters."""
        super().summary({k: v for k, v in values.items() if isinstance(v, str)})
        numbers = {f"summary/{k}": v for k, v in values.items() if not isinstance(v, str)}
        told = dict(self._run.told) or {"name": self._run.name}
        # The name "." adds the values to this run.
        writer = self._tracker.writer
        writer.add_hparams(told, numbers, run_name=".", global_step=self._last_step)

    def close(self, exit_code: int) -> None:
        """Log the exit code and close the writer."""
        self._ensure()
        self._tracker.log({"summary/exit_code": exit_code}, step=0)
        self._tracker.finish()


class MLflowRun(_AccelerateRun):
    """A run of the experiment `tracker.project`. MLflow creates its id, and a file stores it.

    The store is SQLite next to the run folders, or a server. Tested with mlflow 3.17.
    """

    package = "mlflow"

    def load(self) -> None:
        """Disable telemetry and terminal output, then import mlflow."""
        os.environ.update(
            MLFLOW_DISABLE_TELEMETRY="true",
            DO_NOT_TRACK="true",
            MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING="false",  # sampling would disturb measurements
            MLFLOW_LOGGING_LEVEL="WARNING",
        )
        # Accelerate prefers these variables to its arguments. They would merge runs of a sweep.
        for name in ("RUN_ID", "NESTED_RUN", "TAGS", "EXPERIMENT_NAME"):
            os.environ.pop(f"MLFLOW_{name}", None)
        import mlflow

        mlflow.set_tracking_uri(self._uri())

    def _uri(self) -> str:
        """Return `tracker.uri`, else MLflow's own variable, else a file next to the runs."""
        local = f"sqlite:///{(self._run.directory.parent / 'mlflow.db').absolute()}"
        return self._run.settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or local

    def start(self, first_step: int) -> dict[str, int]:
        """Start the run, or continue it in the same store."""
        import mlflow
        from accelerate.tracking import MLflowTracker

        run, uri, file = self._run, self._uri(), self._folder / "run.json"
        known = read_json(file) if file.exists() else {}
        store = hashlib.sha256(uri.encode()).hexdigest()[:16]  # the URI may hold a password
        run_id = known.get("run_id") if known.get("store") == store else None
        try:
            run_id = run_id and mlflow.get_run(run_id).info.run_id
        except mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            run_id = None  # its store was deleted
        own = (self._folder / "artifacts").absolute().as_uri()
        has_server = uri.startswith(("http://", "https://", "databricks"))  # it stores artifacts
        artifacts, name = None if has_server else own, run.name or run.run_id
        tracker = MLflowTracker(run.settings.project, artifacts, run_id=run_id, run_name=name)
        with ExitStack() as held:
            # Two runs that create one database disturb each other.
            with suppress(OSError):  # a file system without locks
                lock = open_file(run.directory.parent / ".mlflow.lock", os.O_RDWR | os.O_CREAT)
                held.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX)
            tracker.start()
        self._tracker = tracker
        if run_id is not None:
            client, keys = mlflow.MlflowClient(), {TRAIN: metrics.LOSS, EVAL: metrics.EVAL_LOSS}
            logged = {kind: client.get_metric_history(run_id, key) for kind, key in keys.items()}
            return {kind: max(p.step for p in points) for kind, points in logged.items() if points}
        self._tracker.store_init_configuration(self._config())
        tags = {"run_id": run.run_id, "command": run.notes, "group": run.settings.group}
        mlflow.set_tags({f"eke.{key}": value for key, value in tags.items() if value})
        write_json(file, {"store": store, "run_id": self._tracker.active_run.info.run_id})
        return {}

    def send(self, rows: Sequence[Row]) -> None:
        """Send all numbers in one transaction, instead of one for each row (`log_metrics`)."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        points = [
            Metric(key, value, now, int(row[metrics.STEP]))
            for row in rows
            for key, value in drawn(row).items()
            if key != metrics.STEP and not isinstance(value, str)
        ]
        client, run_id = MlflowClient(), self._tracker.active_run.info.run_id
        most = 1000  # MAX_METRICS_PER_BATCH of mlflow/utils/validation.py
        for start in range(0, len(points), most):
            client.log_batch(run_id, metrics=points[start : start + most])

    def summary(self, values: Row) -> None:
        """Log numbers as metrics under `summary/`, texts as tags `eke.`."""
        import mlflow

        texts = {key: value for key, value in values.items() if isinstance(value, str)}
        super().summary({key: value for key, value in values.items() if key not in texts})
        mlflow.set_tags({f"eke.{key}": value for key, value in texts.items()})

    def close(self, exit_code: int) -> None:
        """Set MLflow's status for the outcome."""
        import mlflow

        self._ensure()
        status = {EXIT_OK: "FINISHED", EXIT_RESUMABLE: "KILLED"}.get(exit_code, "FAILED")
        mlflow.end_run(status)


class TrackioRun(_AccelerateRun):
    """The run `<run_id>` of the project `tracker.project`, in `trackio` next to the run folders.

    Tested with trackio 0.43. Its store, SQLite with a write-ahead log, requires a local disk.
    """

    package = "trackio"

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self._folder = run.directory.parent / self.package

    def load(self) -> None:
        """Set the folder, which trackio reads on import, disable uploads, and import trackio."""
        os.environ.setdefault("TRACKIO_DIR", str(self._folder.absolute()))
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        for name in ("SPACE_ID", "SERVER_URL", "WEBHOOK_URL", "DATASET_ID"):
            os.environ.pop(f"TRACKIO_{name}", None)
        import trackio  # noqa: F401  # trackio 0.43: imported for its effect

    def start(self, first_step: int) -> dict[str, int]:
        """Start or continue the run."""
        from accelerate.tracking import TrackioTracker

        run, project = self._run, self._run.settings.project
        self._tracker = TrackioTracker(
            project,
            name=run.run_id,
            group=run.settings.group,
            config={"name": run.name, "notes": run.notes, **self._config()},
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # sampling would disturb measurements
            auto_log_cpu=False,
        )
        self._tracker.start()
        return dict.fromkeys((TRAIN, EVAL), self._last_written())

    def close(self, exit_code: int) -> None:
        """Wait for the writer and check the file, as Trackio does not report a full disk."""
        self._ensure()
        self._tracker.finish()
        if (last := self._last_written()) < self._last_step:
            why = f"ends at step {last} of {self._last_step}: is the disk full?"
            raise MirrorError(f"Trackio's file {why}")

    def _last_written(self) -> int:
        from trackio.sqlite_storage import SQLiteStorage

        run = self._tracker.run
        last = SQLiteStorage.get_last_step(run.project, run_id=run.id)
        return -1 if last is None else int(last)
