"""MLflow: a SQLite store below the run folder, or a server. Tested with mlflow 3.17."""

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eke.common.files import read_json, write_json
from eke.plan.record import EXIT_OK, EXIT_RESUMABLE, metrics
from eke.results.trackers.accelerate import TrackerBackend, flat_config
from eke.results.trackers.async_tracker import EVAL, TRAIN
from eke.results.trackers.tracker import Row, TrackedRun

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",  # sampling would disturb what is measured
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}
OUTSIDE = ("MLFLOW_RUN_ID", "MLFLOW_NESTED_RUN", "MLFLOW_TAGS", "MLFLOW_EXPERIMENT_NAME")
"""Variables that Accelerate puts above its arguments: they would merge runs of a sweep."""

REMOTE = ("http://", "https://", "databricks")
"""Beginnings of URIs whose server keeps the artifacts."""

BATCH = 1000
"""Metrics that MLflow takes in one call: MAX_METRICS_PER_BATCH of mlflow/utils/validation.py."""


class MLflowBackend(TrackerBackend):
    """A run of the experiment `tracker.project`; MLflow makes its id, a file keeps it."""

    package = "mlflow"

    def prepare(self, run: TrackedRun, folder: Path) -> None:
        """Disable telemetry and terminal output, then import."""
        os.environ.update(ENVIRONMENT)
        for name in OUTSIDE:
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
        tracker = MLflowTracker(
            experiment_name=run.settings.project,
            logging_dir=None
            if uri.startswith(REMOTE)
            else (folder / "artifacts").absolute().as_uri(),
            run_id=run_id,
            run_name=run.name or run.run_id,
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
