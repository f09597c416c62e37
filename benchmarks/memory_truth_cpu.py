"""Predicted against true peaks of the CPU's tensor allocator, over random small configurations.

python benchmarks/memory_truth_cpu.py [--count N] [--seed N] [--out FILE]

Each is predicted by the tracing process that `eke plan` asks, and trained for two steps in a
process of its own. Targets: mean error at most 0.3 %, 95th percentile 1 %. Nothing is fitted.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "src"), str(REPO / "tests")]

from arguments import at_least, writable  # noqa: E402  # after the path is there
from memory_truth import (  # noqa: E402  # after the path is there
    Outcome,
    cases,
    measured_apart,
    plan_of,
    step_peak,
)

from eke.common.files import write_json  # noqa: E402  # after the path is there
from eke.estimate.memory.trace_client import trace_all  # noqa: E402  # after the path is there
from eke.hardware import environment  # noqa: E402  # after the path is there

GROUPS = ("precision", "optimizer", "attention", "memory", "peft", "kernels", "task")


def statistics_of(errors: list[float]) -> dict[str, Any]:
    """Of absolute relative errors."""
    ordered = sorted(abs(error) for error in errors)
    at = min(len(ordered) - 1, int(0.95 * len(ordered)))
    return {
        "n": len(ordered),
        "mean": round(statistics.mean(ordered), 6),
        "p95": round(ordered[at], 6),
        "max": round(ordered[-1], 6),
    }


def summarise(outcomes: list[Outcome]) -> dict[str, Any]:
    """All, by family, and by option of each group."""
    known = [outcome for outcome in outcomes if outcome.is_known]
    parts: dict[str, list[float]] = defaultdict(list)
    for outcome in known:
        parts["all"].append(outcome.error)
        parts[f"family={outcome.case.family}"].append(outcome.error)
        for override in outcome.case.overrides:
            if override.partition("=")[0] in GROUPS:
                parts[override].append(outcome.error)
    return {name: statistics_of(errors) for name, errors in sorted(parts.items())}


def main() -> None:
    """Predict, measure, compare, write down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=at_least(1), default=120)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--out", type=Path, default=REPO / "results" / "memory_truth_cpu.json")
    arguments = parser.parse_args()
    writable(parser, arguments.out)
    chosen = cases(arguments.seed, arguments.count)
    start = time.perf_counter()
    answers = trace_all([plan_of(case) for case in chosen])
    trace_s = time.perf_counter() - start
    outcomes = []
    for case, answer in zip(chosen, answers, strict=True):
        peak = None if answer.traced is None else step_peak(answer.traced.allocated)
        outcome = Outcome(case, peak, measured_apart(case), answer.reason)
        outcomes.append(outcome)
        error = f"{outcome.error:+9.4%}" if outcome.is_known else answer.reason or "skipped a step"
        print(f"{len(outcomes):4} {error} {' '.join(case.overrides)}", flush=True)
        write_json(  # each time: what is interrupted has measured all the same
            arguments.out,
            {
                "seed": arguments.seed,
                "fitted": "nothing",
                "trace_s": round(trace_s, 1),
                "skipped_steps": sum(o.measured is None for o in outcomes),
                "untraced": sum(o.predicted is None for o in outcomes),
                "environment": environment(),
                "summary": summarise(outcomes),
                "configurations": [outcome.row() for outcome in outcomes],
            },
        )
    for name, row in summarise(outcomes).items():
        print(f"{name:44} {row['n']:4}  {row['mean']:9.4%}  {row['p95']:9.4%}  {row['max']:9.4%}")


if __name__ == "__main__":
    main()
