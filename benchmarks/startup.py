"""What it takes to start: help, a plan, a run to its first step, and a run of a sweep.

    python benchmarks/startup.py --rounds 7 --out results/startup_cpu.json

Seconds of wall time of fresh processes, all in turns within a round; medians with their spread, and
ratios round by round, since a machine is never quiet. Files are warm: one round before is not
counted. The model has 0.1 million parameters and trains one step, on one thread: two that wait for
each other on a machine with one free core would be what is measured.

- `python`: an interpreter that does nothing.
- `imports`: torch, Accelerate and the module of the model, which no such program can do without.
- `eke --help`, `train.py --help`, `eke plan`: the whole command.
- `run to first step`: from typing `python train.py` to the first row of metrics.jsonl.
- `run`: to its end, with its record.
- `run of a sweep`: what one more run adds to a sweep, in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from arguments import at_least, writable
from paired import summarize
from provenance import machine, provenance

REPO = Path(__file__).resolve().parents[1]

EMPTY = (
    "model.hidden_size=32", "model.num_hidden_layers=2", "model.num_attention_heads=2",
    "model.intermediate_size=64", "data=synthetic", "data.num_samples=8", "batch.per_device=4",
    "data.seq_len=32", "train.steps=1", "train.log_every=1", "train.eval_every=null",
    "train.save_final=false", "tracker=none", "hardware=cpu",
)  # fmt: skip
"""A run that does as little as a run can."""

NEEDED = "import torch, accelerate, transformers.models.llama.modeling_llama"

POLL_S = 0.002

REFERENCES = {
    "run to first step": "imports",
    "run": "imports",
    "run of a sweep": "imports",
    "eke --help": "python",
    "train.py --help": "python",
    "eke plan": "python",
}
"""Of each ratio."""


def timed(*command: str, folder: Path) -> float:
    """Seconds until a command has ended well."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *command], cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - begin


def train(folder: Path, *typed: str) -> tuple[float, float]:
    """Seconds to the first row, and to the end, of a run."""
    begin, first = time.perf_counter(), 0.0
    with subprocess.Popen(
        [sys.executable, str(REPO / "train.py"), *EMPTY, *typed],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        while process.poll() is None:
            if not first and any('"train/loss"' in f.read_text() for f in metrics_in(folder)):
                first = time.perf_counter() - begin
            time.sleep(POLL_S)
        total = time.perf_counter() - begin
        assert process.stderr
        assert process.returncode == 0, process.stderr.read().decode()
    assert first, "the run has logged no step"
    return first, total


def metrics_in(folder: Path) -> list[Path]:
    """Rows of the runs in a folder."""
    return list(folder.glob("runs/*/metrics.jsonl"))


def sweep(folder: Path, runs: int) -> float:
    """Seconds from one run to the next, of a sweep on one CPU slot."""
    command = [sys.executable, str(REPO / "train.py"), "-m", *EMPTY, f"seed=range({runs})"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    entries = [json.loads(f.read_text()) for f in folder.glob("runs/*/attempts.jsonl")]
    assert len(entries) == runs
    starts = sorted(entry["started"] for entry in entries)
    return median(later - earlier for earlier, later in pairwise(starts))


def one_round(root: Path, runs: int) -> dict[str, float]:
    """A turn of each."""
    folders = iter(range(100))

    def fresh() -> Path:
        folder = root / str(next(folders))
        folder.mkdir(parents=True)
        return folder

    found = {
        "python": timed("-c", "pass", folder=fresh()),
        "imports": timed("-c", NEEDED, folder=fresh()),
        "eke --help": timed("-m", "eke", "--help", folder=fresh()),
        "train.py --help": timed(str(REPO / "train.py"), "--help", folder=fresh()),
        "eke plan": timed("-m", "eke", "plan", *EMPTY, folder=fresh()),
    }
    found["run to first step"], found["run"] = train(fresh())
    found["run of a sweep"] = sweep(fresh(), runs)
    return found


def measure(rounds: int, runs: int, say: Callable[[str], object]) -> dict[str, list[float]]:
    """Seconds of each, one entry per round; the first round warms the files and is left out."""
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["EKE_LEASES"] = os.environ["EKE_CALIBRATION"] = f"{folder}/eke"
            took = one_round(Path(folder), runs)
        if number == 0:
            continue
        for name, seconds in took.items():
            found.setdefault(name, []).append(seconds)
        say(f"round {number}: " + ", ".join(f"{n} {s:.2f}" for n, s in took.items()) + "\n")
    return found


def results(found: dict[str, list[float]]) -> dict[str, object]:
    """Summaries of seconds and of ratios within a round."""
    ratios = {
        f"{name} / {other}": [a / b for a, b in zip(found[name], found[other], strict=True)]
        for name, other in REFERENCES.items()
    }
    return {
        "seconds": {name: summarize(values).as_dict() for name, values in found.items()},
        "ratios": {name: summarize(values).as_dict() for name, values in ratios.items()},
    }


def main(arguments: Sequence[str]) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=at_least(2), default=7)
    parser.add_argument("--runs", type=at_least(2), default=6, help="of each sweep")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.out:
        writable(parser, options.out)
    load = round(os.getloadavg()[0], 1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = str(REPO / "src")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed eke is compiled
    found = measure(options.rounds, options.runs, sys.stderr.write)
    where = {"machine": machine() | {"load_1min_before": load}, "environment": provenance()}
    text = json.dumps({**results(found), **where}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
