"""What launching costs per run: eke's pool and SLURM launcher beside Hydra's own launchers.

    pip install hydra-joblib-launcher hydra-submitit-launcher    # for those two of Hydra's
    python benchmarks/launching.py --runs 20 --rounds 3 --out results/launching.json

Every run is a process (Hydra's basic launcher: a function call) that does nothing but leave a
record, so that what is measured is the launcher. All launchers take turns within a round. Seconds
per run, from a bare loop of the same processes too: what a launcher adds is the difference.

- `bare`: the processes one after the other, nobody watching.
- `eke`: planned cells on a pool of one slot: folder, plan, lock, process, record, sweep.json.
- `hydra basic`, `joblib`, `submitit_local`: composition included, which Hydra does twice.
- `composing`: what composing a cell costs eke, which is not in `eke`.
- `sbatch`: a thousand planned cells put into a SLURM queue by a program that answers at once:
  frozen plans, ledger, and how often sbatch and squeue were called.
- `status`: `eke status` of a folder of ten thousand runs.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from arguments import at_least, writable
from provenance import machine, provenance

from eke.common.paths import RunPaths
from eke.config.compose import compose
from eke.config.sweep import expand
from eke.launch.devices import find_devices
from eke.launch.interface import find_launcher
from eke.launch.local import Pool
from eke.launch.processes import worker_process as supervising
from eke.launch.processes.progress_table import ProgressTable
from eke.launch.processes.sweep import SweepFile, SweepRun, sweep_paths
from eke.launch.processes.sweep_scheduler import SweepState
from eke.launch.slurm.dispatch import Cluster
from eke.plan.planner import outline_record
from eke.plan.record import Outcome, start_attempt, write_record
from eke.workflows.sweep import make_jobs, plan_cells

WORKER = """\
import json, os, sys, time
folder = sys.argv[1]
record = json.load(open(os.environ["EKE_BENCH_RECORD"]))
with open(folder + "/attempts.jsonl", "a") as file:
    entry = {"attempt": 0, "pid": os.getpid(), "host": "here"}
    file.write(json.dumps(entry) + "\\n")
with open(folder + "/.new", "w") as file:
    json.dump(record, file)
os.rename(folder + "/.new", folder + "/record.json")
"""
"""A worker that trains nothing; started without the site packages, which takes milliseconds."""

HYDRA = """\
import hydra
@hydra.main(version_base="1.3", config_path=None)
def main(config):
    pass
main()
"""


class Quiet(ProgressTable):
    """Shows nothing."""

    def _say(self, job: object, text: str) -> None:
        pass


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def bare(folder: Path, runs: int) -> None:
    """The same processes, nobody watching."""
    for number in range(runs):
        run = folder / str(number)
        run.mkdir(parents=True)
        subprocess.run([sys.executable, "-S", "-c", WORKER, str(run)], check=True)


def planned(folder: Path, runs: int) -> list:
    """Cells of a sweep and their plans."""
    cells = expand([f"seed=range({runs})", "hardware=cpu", f"paths.runs={folder}"]).cells
    made, plans = plan_cells(cells, "bench", lambda *_: None)
    return [made, make_jobs([str(n) for n in range(runs)], plans, {})]


def pool(folder: Path, cells: list[SweepRun], jobs: list) -> None:
    """Eke's pool."""
    file = SweepFile(sweep_paths(str(folder), "bench"), ["-m"], cells)
    books, devices = SweepState(jobs, Quiet(file), file), {"cpu": find_devices(jobs[0].plan)}
    Pool(books, devices).wait()
    assert all(job.outcome is Outcome.ok for job in jobs)


def hydra_sweep(script: Path, runs: int, *options: str) -> None:
    """One of Hydra's launchers."""
    command = [sys.executable, str(script), "-m", f"+x=range({runs})", *options]
    subprocess.run(command, cwd=script.parent, check=True, capture_output=True)


def use_stand_in(root: Path) -> None:
    """Have the pool start a worker that trains nothing and leaves the record of another run."""
    root.mkdir(parents=True, exist_ok=True)
    _, (job, *_) = planned(root / "one", 1)
    paths = RunPaths(root / "template")
    paths.folder.mkdir()
    start_attempt(paths, {})
    write_record(paths, outline_record(job.plan, [], 0, Outcome.ok, None))
    record = root / "record.json"
    shutil.copy(paths.record, record)
    os.environ["EKE_BENCH_RECORD"] = str(record)
    supervising.worker_command = lambda paths, *_: [  # type: ignore[assignment]
        sys.executable, "-S", "-c", WORKER, str(paths.folder)
    ]  # fmt: skip


def pool_rounds(root: Path, runs: int, rounds: int) -> dict[str, object]:
    """Seconds per run of each launcher, in turns."""
    use_stand_in(root)
    script = root / "app.py"
    script.write_text(HYDRA)
    launchers = {"hydra basic": ["hydra/launcher=basic"]}
    for name, package in (("joblib", "joblib"), ("submitit_local", "submitit")):
        try:
            __import__(f"hydra_plugins.hydra_{package}_launcher")
        except ImportError:
            continue
        extra = ["hydra.launcher.n_jobs=1"] if name == "joblib" else []
        launchers[f"hydra {name}"] = [f"hydra/launcher={name}", *extra]
    own = ("bare", "eke", "composing")
    found: dict[str, list[float]] = {name: [] for name in (*own, *launchers)}
    for number in range(rounds):
        here = root / f"round-{number}"
        found["bare"].append(seconds(lambda here=here: bare(here / "bare", runs)) / runs)
        began = time.perf_counter()
        cells, jobs = planned(here / "eke", runs)
        found["composing"].append((time.perf_counter() - began) / runs)
        found["eke"].append(seconds(lambda: pool(here / "eke", cells, jobs)) / runs)  # noqa: B023  # called at once
        for name, options in launchers.items():
            took = seconds(lambda options=options: hydra_sweep(script, runs, *options))
            found[name].append(took / runs)
    return {
        name: {
            "median_s": round(statistics.median(times), 4),
            "all_s": [round(t, 4) for t in times],
        }
        for name, times in found.items()
    }


def submission(root: Path, runs: int) -> dict[str, object]:
    """A thousand cells into a queue that answers at once."""
    stubs, calls = root / "bin", root / "calls"
    stubs.mkdir(parents=True)
    answers = {"sbatch": "echo 7", "squeue": ":", "sacct": "exit 1", "scontrol": ":"}
    for name, answer in answers.items():
        (stubs / name).write_text(f"#!/bin/sh\necho {name} >> {calls}\n{answer}\n")
        (stubs / name).chmod(0o755)
    os.environ["PATH"] = f"{stubs}:{os.environ['PATH']}"
    began = time.perf_counter()
    cells, jobs = planned(root / "slurm", runs)
    planning = time.perf_counter() - began
    file = SweepFile(sweep_paths(str(root / "slurm"), "bench"), ["-m"], cells)
    books = SweepState(jobs, Quiet(runs), file, find_launcher("slurm").place_of)
    cluster = Cluster(books, sweep_paths(str(root / "slurm"), "bench"), "bench")
    took = seconds(cluster.submit)
    names = calls.read_text().split()
    return {
        "cells": runs, "planning_s": round(planning, 1), "submitting_s": round(took, 1),
        "calls": {name: names.count(name) for name in answers},
    }  # fmt: skip


def status(root: Path, runs: int) -> dict[str, object]:
    """`eke status` of very many runs."""
    _, (job, *_) = planned(root / "one", 1)
    first = RunPaths(root / "runs" / "0")
    first.folder.mkdir(parents=True)
    start_attempt(first, {})
    write_record(first, outline_record(job.plan, [], 0, Outcome.ok, None))
    for name in ("plan", "config"):
        (first.folder / f"{name}.json").write_text("{}")
    for number in range(1, runs):
        shutil.copytree(first.folder, root / "runs" / str(number))
    command = [sys.executable, "-m", "eke", "status", str(root / "runs")]
    took = seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
    return {"runs": runs, "seconds": round(took, 2)}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=at_least(1), default=20)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--cells", type=at_least(1), default=1000, help="of the submission")
    parser.add_argument(
        "--many", type=at_least(1), default=10_000, help="run folders of the status"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.out:
        writable(parser, options.out)
    compose(["hardware=cpu"])  # imports, and Hydra's search for plugins
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ["EKE_LEASES"] = str(root / "leases")
        found: dict[str, object] = {
            "per_run": pool_rounds(root / "pool", options.runs, options.rounds),
            "sbatch": submission(root / "submission", options.cells),
            "status": status(root / "status", options.many),
            "machine": machine(),
            "environment": provenance(),
        }
    text = json.dumps(found, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
