"""What calibration would have been worth: fitted on half of the committed rows, tried on the rest.

python benchmarks/forecast_calibration.py [--splits N] [--seed N] [--out FILE]

Takes predicted and measured memory of results/forecast_bounds_cpu.json (formulas) and
results/memory_truth_cpu.json (traces) as if each row were a finished run: a random half of each
group calibrates, and the other half is what comes next. Both errors are of the rows that were held
out, raw and calibrated; nothing is trained. Groups are those of
`eke.estimate.memory.calibration`: rows with the same doubts.
"""

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

from arguments import at_least, writable

from eke.common.errors import ConfigError
from eke.common.files import write_atomic
from eke.config.compose import compose
from eke.estimate.memory.calibration import Pair, correction_of
from eke.estimate.memory.components import doubts_of
from eke.hardware import environment
from eke.workflows.planning import plan_for

REPO = Path(__file__).resolve().parents[1]

FIXED = {
    "forecast_bounds_cpu": (
        "data=synthetic", "data.num_samples=32", "data.num_eval_samples=2", "train.steps=2",
        "train.save_final=false", "tracker=none", "hardware=cpu",
    ),
    "memory_truth_cpu": (),
}  # fmt: skip
"""File of results -> what its rows' overrides leave out."""

COLUMN = {"forecast_bounds_cpu": "expected", "memory_truth_cpu": "predicted"}

Groups = dict[tuple[str, ...], list[Pair]]


def groups_of(name: str) -> Groups:
    """The pairs of a file of results by their doubts; without what rules refuse by now."""
    content = json.loads((REPO / "results" / f"{name}.json").read_text())
    rows = content["rows"] if "rows" in content else content["configurations"]
    found: Groups = defaultdict(list)
    for number, row in enumerate(rows):
        predicted, measured = row[COLUMN[name]], row["measured"]
        if predicted is None or measured is None:
            continue
        try:
            plan = plan_for(compose([*row["overrides"].split(), *FIXED[name]]), planning=True)
        except ConfigError as error:  # rules have come since it was measured
            sys.stderr.write(f"left out: {name}, row {number}: {error.short()}\n")
            continue
        pair = Pair(str(number), str(number), predicted, measured)
        found[tuple(sorted(doubt.value for doubt in doubts_of(plan)))].append(pair)
    return found


def held_out(groups: Groups, rng: Random) -> list[dict[str, float]]:
    """Errors of one half of each group: as predicted, and as the other half corrects it."""
    rows = []
    for pairs in groups.values():
        drawn = rng.sample(pairs, len(pairs))
        known, next_ones = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
        fitted = correction_of(known)
        for pair in next_ones if fitted is not None else ():
            assert fitted is not None
            off = pair.log_ratio - math.log(fitted.factor)
            rows.append(
                {
                    "raw": abs(pair.predicted / pair.measured - 1),
                    "calibrated": abs(pair.predicted * fitted.factor / pair.measured - 1),
                    "inside": abs(off) <= fitted.within,
                    "within": math.expm1(fitted.within),
                }
            )
    return rows


def summarised(rows: list[dict[str, float]], splits: int) -> dict[str, Any]:
    """Of all splits together."""
    return {
        "splits": splits,
        "held_out": len(rows),
        "raw_mean": round(statistics.mean(row["raw"] for row in rows), 6),
        "raw_median": round(statistics.median(row["raw"] for row in rows), 6),
        "calibrated_mean": round(statistics.mean(row["calibrated"] for row in rows), 6),
        "calibrated_median": round(statistics.median(row["calibrated"] for row in rows), 6),
        "inside_frac": round(statistics.mean(row["inside"] for row in rows), 4),
        "within_median": round(statistics.median(row["within"] for row in rows), 6),
    }


def main() -> int:
    """Split, fit, compare, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--splits", type=at_least(1), default=200)
    parser.add_argument("--seed", type=int, default=1)
    out = REPO / "results" / "forecast_calibration_cpu.json"
    parser.add_argument("--out", type=Path, default=out)
    arguments = parser.parse_args()
    writable(parser, arguments.out)
    content: dict[str, Any] = {"seed": arguments.seed, "environment": environment(), "files": {}}
    for name in FIXED:
        groups, rng = groups_of(name), Random(arguments.seed)
        rows = [row for _ in range(arguments.splits) for row in held_out(groups, rng)]
        content["files"][name] = summarised(rows, arguments.splits)
    sys.stdout.write(json.dumps(content["files"], indent=1) + "\n")
    write_atomic(arguments.out, json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
