"""Record a real sweep of four configurations in six rounds, for the tests of `eke compare`.

python benchmarks/compare_rounds.py results/compare_rounds_cpu.json

The first record is written whole, the others as differences from it (`restored`). The test compares
odd with even rounds, and with 10 % less speed. A round takes less than a minute: what changes more
slowly is in odd and even rounds. Steps of about 50 ms differ less between equal runs than steps of
10 ms (notes/lab/method.md). Root may add `nice -n -20`. No other run of eke may use the machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from arguments import writable
from provenance import machine

SWEEP = (
    "experiment=smoke", "train.steps=100", "train.timing_warmup_steps=10", "train.save_final=false",
    "batch.per_device=8", "data.seq_len=64", "tracker=none", "optimizer=adamw,adafactor",
    "memory=none,checkpointing", "sweep.repeats=6", "sweep.seeds=per_repeat",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]


def changes(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Values of `other` that differ; `=` marks a table that is whole."""
    found: dict[str, Any] = {}
    for key, value in other.items():
        before = first.get(key)
        if isinstance(value, dict) and isinstance(before, dict) and value.keys() == before.keys():
            found |= {key: inner} if (inner := changes(before, value)) else {}
        elif value != before:
            found[key] = {"=": value} if isinstance(value, dict) else value
    return found


def restored(first: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The record whose `changes` these are."""
    found = dict(first)
    for key, value in change.items():
        if isinstance(value, dict):
            value = value["="] if "=" in value else restored(first[key], value)
        found[key] = value
    return found


def plain_record(record: dict[str, Any]) -> dict[str, Any]:
    """Without names of this machine, and without parts that no comparison reads."""
    plan = record["plan"]
    kept = {key: plan[key] for key in ("batch", "steps", "size", "data_fingerprint")}
    typed = [text for text in record["overrides"] if not text.startswith("paths.runs=")]
    config = {**record["config"], "paths": {**record["config"]["paths"], "runs": "runs"}}
    seen = {**record["environment"], "host": "", "os": "Linux"}
    return {**record, "plan": kept, "overrides": typed, "command": ["python", "train.py", *typed],
            "config": config, "name": " ".join(typed), "environment": seen, "effective": {},
            "warnings": []}  # fmt: skip


def main() -> None:
    """Run the sweep and write its records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    writable(parser, asked.out)
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "train.py", "-m", *SWEEP, f"paths.runs={folder}"]
        # One thread, so that what else runs on the machine finds another core.
        subprocess.run(words, cwd=ROOT, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        (file,) = Path(folder).glob("sweep-*/sweep.json")
        cells = json.loads(file.read_text())["cells"]
        files = [Path(folder) / Path(cell["folder"]).name / "record.json" for cell in cells]
        first, *others = [plain_record(json.loads(each.read_text())) for each in files]
    content = {"command": ["-m", *SWEEP], "machine": machine(), "first": first,
               "changes": [changes(first, each) for each in others]}  # fmt: skip
    asked.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{len(files)} records: {asked.out}")
    if any(each["shared_device"] for each in (first, *others)):
        parser.error("another run used the device: its speeds are no measurements")


if __name__ == "__main__":
    main()
