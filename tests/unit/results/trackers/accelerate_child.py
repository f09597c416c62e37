"""Attempts and readers, each in a process that is forked from one which has imported most of it.

Each line on stdin is a request, answered with the process's exit code once it ended.
"""

import gc
import importlib
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.utils.tensorboard  # noqa: F401  # torch 2.13: imported for its effect
from accelerate import Accelerator

from eke.common.paths import RunPaths
from eke.config import schema
from eke.plan.record import metrics
from eke.results.trackers import TrackedRun, build_tracker
from eke.results.trackers.tracker import Row

RUN_ID = "0123456789abcdef"
OTHERS = ("f" * 16,)
"""Names of folders of runs with another id."""
LIBRARIES = {
    "mlflow": (
        "alembic.command", "click", "fastapi", "opentelemetry.sdk.trace", "pandas", "requests",
        "scipy.sparse", "sqlalchemy.orm", "sqlparse",
    ),
    "trackio": ("pandas",),
}  # fmt: skip
"""What trackers import. Themselves they are eke's to import, after it has set the environment."""


def make_row(step: int, attempt: int) -> Row:
    """A step below zero stands for an evaluation at that step."""
    row = {"train/global_step": abs(step), "attempt": attempt}
    return {**row, **({"eval/loss": 0.25} if step < 0 else {"train/loss": 1 / step})}


def attempt(option: str, folder: str, attempt: int, exit_code: int, *steps: int) -> None:
    """An attempt in small."""
    logging.basicConfig(level=logging.INFO)  # as the worker does
    run = TrackedRun(
        run_id=Path(folder).name if Path(folder).name in OTHERS else RUN_ID,
        name="precision=bf16",
        tags=("cpu",),
        notes="python train.py precision=bf16",
        factors={"precision": "bf16"},
        config={"optimizer": {"lr": 1e-3}, "seed": 7, "path": None, "list": [1, 2]},
        directory=Path(folder),
        attempt=attempt,
        settings=schema.Tracker(option=option, group="sweep-1"),
        told={"precision": "bf16", "optimizer.lr": 1e-3},
    )
    tracker = build_tracker(run)
    Accelerator(cpu=True)
    for step in steps:
        row = make_row(step, attempt)
        with suppress(OSError):  # the test of a full disk is about the tracker
            metrics.append_rows(RunPaths(run.directory).metrics, [row])
        tracker.log([row])
    tracker.summary({"outcome": "ok", "tokens_per_s": 12.5})
    tracker.finish(exit_code)
    print(f"problem: {tracker.problem}", flush=True)


def read(option: str, folder: str) -> None:
    """Print what the library's own reader finds."""
    readers = {"tensorboard": read_tensorboard, "mlflow": read_mlflow, "trackio": read_trackio}
    print(json.dumps(readers[option](Path(folder))))


def read_tensorboard(folder: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    def load(path: Path) -> EventAccumulator:
        events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        return events

    runs = load(folder / "tensorboard" / RUN_ID)
    raw = runs.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    data = HParamsPluginData.FromString(raw).session_start_info.hparams
    config = {k: v.string_value or v.number_value for k, v in data.items()}
    raw = runs.SummaryMetadata("_hparams_/experiment").plugin_data.content
    metrics = [m.name.tag for m in HParamsPluginData.FromString(raw).experiment.metric_infos]
    scalars = {
        tag: [(e.step, e.value) for e in runs.Scalars(tag)] for tag in runs.Tags()["scalars"]
    }
    texts = {
        tag.removesuffix("/text_summary"): runs.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in runs.Tags()["tensors"]
    }
    found = {"scalars": scalars, "config": config, "words": texts, "runs": 1}
    return {**found, "metrics": metrics}


def read_mlflow(folder: Path) -> dict[str, Any]:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder.parent / 'mlflow.db'}")
    experiment = mlflow.get_experiment_by_name("eke")
    runs = mlflow.search_runs([experiment.experiment_id], output_format="list")
    client = mlflow.MlflowClient()
    history = {
        key: [(p.step, p.value) for p in client.get_metric_history(runs[0].info.run_id, key)]
        for key in runs[0].data.metrics
    }
    words = {key: value for key, value in runs[0].data.tags.items() if key.startswith("eke.")}
    found = {"scalars": history, "config": runs[0].data.params, "words": words, "runs": len(runs)}
    return {**found, "status": runs[0].info.status}


def read_trackio(folder: Path) -> dict[str, Any]:
    os.environ["TRACKIO_DIR"] = str(folder.parent / "trackio")
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = list(trackio.Api().runs("eke"))
    scalars: dict[str, list[tuple[int, float]]] = {}
    words = {}
    for row in SQLiteStorage.get_logs("eke", run_id=runs[0].id):
        for key, value in row.items():
            if isinstance(value, str):
                words[key] = value
            else:
                scalars.setdefault(key, []).append((row["step"], value))
    return {"scalars": scalars, "config": runs[0].config, "words": words, "runs": len(runs)}


def migrate(file: str) -> None:
    """Make MLflow's database, without a run."""
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{file}")
    mlflow.search_experiments()


CALLS: dict[str, Callable[..., None]] = {"attempt": attempt, "read": read, "migrate": migrate}


def become(output: str, environment: dict[str, str], limit: int | None) -> None:
    """In a fork: its own output and environment; a limit on the size of files, as a full disk."""
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(descriptor, number)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def main() -> None:
    """Fork for each request; a fork leaves by the interpreter's own exit."""
    for line in iter(sys.stdin.readline, ""):
        request: dict[str, Any] = json.loads(line)
        call: str = request.pop("call")
        words: Sequence[Any] = request.pop("words")
        for name in LIBRARIES.get(words[0], ()):
            importlib.import_module(name)
        gc.freeze()  # a fork's last collection would copy all pages
        pid = os.fork()
        if not pid:
            become(**request)
            CALLS[call](*words)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
