"""The guides' table of memory, measured in 2022 and predicted for that day's libraries and today's.

python benchmarks/guide_memory.py [--out FILE]

Needs no GPU. Writes results/guide_memory.json.
"""

import argparse
import statistics
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "src"), str(REPO / "tests")]

from arguments import writable  # noqa: E402  # after the path is there
from reference.libraries_2022 import libraries_of_2022  # noqa: E402  # after the path is there
from reference.published import SETTING, SOURCE  # noqa: E402  # after the path is there
from unit.training.trace.test_guide_rows import NINE, predicted_mb  # noqa: E402  # after the path is there

from eke.common.files import write_json  # noqa: E402  # after the path is there
from eke.hardware import environment  # noqa: E402  # after the path is there


def main() -> None:
    """Predict each row twice, print the table, write it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=REPO / "results" / "guide_memory.json")
    arguments = parser.parse_args()
    writable(parser, arguments.out)
    with libraries_of_2022():
        then = [predicted_mb(row, "attention=eager") for row in NINE]
    now = [predicted_mb(row) for row in NINE]
    errors = [p / row.memory_mb - 1 for p, row in zip(then, NINE, strict=True)]
    rows = [
        {"row": row.technique, "measured_mib": row.memory_mb, "predicted_2022_mib": round(old),
         "error_frac": round(error, 5), "predicted_today_mib": round(new)}
        for row, old, new, error in zip(NINE, then, now, errors, strict=True)
    ]  # fmt: skip
    sizes = [abs(error) for error in errors]
    summary = {"mean_abs": round(statistics.mean(sizes), 5), "max_abs": round(max(sizes), 5)}
    print(f"{'MiB':40}{'measured':>9}{'2022':>8}{'error':>9}{'today':>8}")
    for row in rows:
        print(
            f"{row['row']:40}{row['measured_mib']:9}{row['predicted_2022_mib']:8}"
            f"{row['error_frac']:+9.2%}{row['predicted_today_mib']:8}"
        )
    print(f"mean {summary['mean_abs']:.2%}, largest {summary['max_abs']:.2%}")
    write_json(
        arguments.out,
        {"setting": SETTING, "source": SOURCE, "environment": environment(), "rows": rows,
         "summary": summary},
    )  # fmt: skip


if __name__ == "__main__":
    main()
