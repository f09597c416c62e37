"""What the libraries' own readers find: `python accelerate_read.py OPTION FOLDER` prints JSON."""

import json
import os
import sys
from pathlib import Path
from typing import Any

RUN_ID = "0123456789abcdef"


def read_tensorboard(folder: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    def load(path: Path) -> EventAccumulator:
        events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        return events

    runs = load(folder / "tensorboard" / RUN_ID)
    (hparams,) = {p.parent for p in (folder / "tensorboard" / RUN_ID).glob("*/events*")}
    raw = load(hparams).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    data = HParamsPluginData.FromString(raw).session_start_info.hparams
    config = {k: v.string_value or v.number_value for k, v in data.items()}
    scalars = {
        tag: [(e.step, e.value) for e in runs.Scalars(tag)] for tag in runs.Tags()["scalars"]
    }
    texts = {
        tag.removesuffix("/text_summary"): runs.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in runs.Tags()["tensors"]
    }
    return {"scalars": scalars, "config": config, "words": texts, "runs": 1}


def read_mlflow(folder: Path) -> dict[str, Any]:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")
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
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
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


if __name__ == "__main__":
    readers = {"tensorboard": read_tensorboard, "mlflow": read_mlflow, "trackio": read_trackio}
    print(json.dumps(readers[sys.argv[1]](Path(sys.argv[2]))))
