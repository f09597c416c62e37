"""What a report costs: seconds and bytes over 100 to 10,000 made-up records.

    python benchmarks/reporting.py                # prints a table; --output FILE keeps it as JSON

Each record is a run's own file of about 13 KB, as eke writes it. Sizes are interleaved over
rounds; every number is a median of fresh processes, as a user starts them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from arguments import at_least, writable
from provenance import machine, provenance
from unit.results.report.made import Run, make_sweep

REPEATS = 4
"""Runs of each configuration, as in a sweep with repeats."""


def make(folder: Path, count: int) -> Path:
    """A sweep with so many runs: configurations that differ in four keys, and their repeats."""
    runs = [
        Run(
            {
                "precision": ("fp32", "bf16")[n % 2],
                "optimizer": ("adamw", "lion", "adafactor")[n % 3],
            },
            repeat=repeat,
            speed=100.0 + n + repeat / 10,
            peak=(1 + n % 97) * 2**20,
            keys={"optimizer.lr": 1e-5 * (1 + n), "batch.per_device": 1 + n % 7},
        )
        for repeat in range(REPEATS)
        for n in range(count // REPEATS)
    ]
    return make_sweep(folder, runs)


def report(sweep: Path, formats: str) -> float:
    """Seconds of one `eke report`, from the command to its end."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "eke", "report", str(sweep), "--formats", formats]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    """Make, report, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=at_least(REPEATS), nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.output:
        writable(parser, options.output)
    with tempfile.TemporaryDirectory() as folder:
        sweeps = {count: make(Path(folder) / str(count), count) for count in options.counts}
        report(sweeps[options.counts[0]], "html")  # the script of the pictures is put together once
        seconds: dict[int, list[float]] = {count: [] for count in sweeps}
        for _ in range(options.rounds):
            for count, sweep in sweeps.items():
                seconds[count].append(report(sweep, "html,md,json,csv"))
        rows = [
            {
                "records": count,
                "seconds": statistics.median(seconds[count]),
                "seconds_of_rounds": seconds[count],
                "html_bytes": (sweep / "report.html").stat().st_size,
                "json_bytes": (sweep / "report.json").stat().st_size,
            }
            for count, sweep in sweeps.items()
        ]
    print(f"{'records':>8}  {'seconds':>8}  {'page, MB':>8}  {'JSON, MB':>8}")
    for row in rows:
        sizes = [f"{row[key] / 1e6:8.2f}" for key in ("html_bytes", "json_bytes")]
        print(f"{row['records']:8d}  {row['seconds']:8.2f}  {'  '.join(sizes)}")
    if options.output:
        content = {
            "what": "seconds of `eke report` over made-up records, all four files",
            "machine": machine(),
            "environment": provenance(),
            "rows": rows,
        }
        options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
