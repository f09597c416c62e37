"""What a report finds in simulated sweeps, and how often it claims what is not there.

python benchmarks/report_power.py [results/report_power.json]

Half of the rows differ from the baseline by +10 or -10 %; three repeats of 2 % noise. `error` is
the share of sweeps with a false claim: where nothing differs, and of the other rows where some do.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
from arguments import writable
from provenance import machine, provenance

from eke.report.compare.noise import compare
from eke.report.compare.statistics import Decision, correct

SWEEPS, REPEATS, NOISE = 2000, 3, 0.02
ROWS = (4, 6, 12, 20, 30)
CLAIM = {Decision.higher: 1, Decision.lower: -1}


def noises(kind: str, rows: int, random: np.random.Generator) -> np.ndarray:
    """Standard deviation of each row's logarithm; the baseline is the first."""
    if kind == "lognormal":
        return NOISE * np.exp(0.5 * random.normal(size=rows))
    found = np.full(rows, NOISE)
    if kind == "one noisy":
        found[-1] *= 5
    return found


def simulate(kind: str, effects: list[float], seed: int, sweeps: int = SWEEPS) -> dict[str, float]:
    """Shares over sweeps: with a false claim, planted differences found, last row named noisy."""
    random, rows = np.random.default_rng(seed), len(effects)
    false = found = planted = named = 0
    for _ in range(sweeps):
        noise = noises(kind, rows, random) * random.normal(size=(REPEATS, rows))
        repeat = 0.05 * random.normal(size=(REPEATS, 1))
        values = np.exp(np.array(effects) + repeat + noise).tolist()
        base, *others = [dict(enumerate(column)) for column in zip(*values, strict=True)]
        ratios, noisy = compare(base, others)
        decided = correct({n: each for n, each in enumerate(ratios, 1) if each})
        claims = [CLAIM.get(decided[n].decision, 0) for n in range(1, rows)]
        truth = [int(math.copysign(1, e)) if e else 0 for e in effects[1:]]
        false += any(c and c != t for c, t in zip(claims, truth, strict=True))
        found += sum(bool(c) and c == t for c, t in zip(claims, truth, strict=True))
        planted += sum(map(bool, truth))
        named += noisy[-1]
    power = found / planted if planted else math.nan
    return {"error": false / sweeps, "power": power, "named": named / sweeps}


def measure(kind: str, rows: int) -> dict[str, float]:
    """One kind of noise and number of rows, the baseline among them."""
    half = [math.log((1.1, 0.9)[n // 2 % 2]) if n % 2 else 0.0 for n in range(rows)]
    null, some = simulate(kind, [0.0] * rows, 1), simulate(kind, half, 2)
    found = {"error": null["error"], "error_among_others": some["error"], "power": some["power"]}
    return found | ({"named": null["named"]} if kind == "one noisy" else {})


def main() -> None:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", help="a file for what is printed")
    asked = parser.parse_args()
    if asked.out:
        writable(parser, asked.out)
    found = {
        kind: {rows: measure(kind, rows) for rows in ROWS}
        for kind in ("equal", "lognormal", "one noisy")
    }
    record = {"sweeps": SWEEPS, "repeats": REPEATS, "noise": NOISE, "difference": 0.1, **found,
              "machine": machine(), "environment": provenance()}  # fmt: skip
    text = json.dumps(record, indent=2)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
