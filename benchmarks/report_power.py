"""What a report finds in simulated sweeps, and how often it claims what is not there.

python benchmarks/report_power.py [results/report_power.json]

Half of the rows differ from the baseline by +10 or -10 %; three repeats of 2 % noise. `error` is
the share of sweeps with a false claim where nothing differs, `error_among_others` where half of the
rows do. `pooled` is the same with one variance for all rows. The noisy row itself does not differ.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
from arguments import writable
from provenance import machine, provenance
from scipy.special import stdtr

from eke.results.report.compare.statistics import Noise, chance_beyond

SWEEPS, REPEATS, NOISE, TOGETHER = 2000, 3, 0.02, 200
ROWS = (4, 6, 12, 20, 30)
KINDS = ("equal", "lognormal", "one noisy")


def noises(kind: str, rows: int, random: np.random.Generator) -> np.ndarray:
    """Standard deviations of each row's logarithm, (TOGETHER, rows); the baseline is the first."""
    found = np.full((TOGETHER, rows), NOISE)
    if kind == "lognormal":
        found *= np.exp(0.5 * random.normal(size=found.shape))
    elif kind == "one noisy":
        found[:, -1] *= 5
    return found


def claims(chances: np.ndarray, differences: np.ndarray) -> np.ndarray:
    """Sign of each difference that Holm's method resolves at 5 %, else 0; (sweeps, others)."""
    number = chances.shape[1]
    order = np.argsort(chances, axis=1)
    limits = 0.05 / (number - np.arange(number))
    holds = np.cumprod(np.take_along_axis(chances, order, 1) <= limits, axis=1)
    claimed = np.zeros_like(differences)
    np.put_along_axis(claimed, order, holds.astype(float), 1)
    return claimed * np.sign(differences)


def pooled(logs: np.ndarray, differences: np.ndarray) -> np.ndarray:
    """Chances with one variance for all rows."""
    rest = logs - logs.mean(1, keepdims=True)
    rest -= rest.mean(2, keepdims=True)
    freedom = (REPEATS - 1) * (logs.shape[2] - 1)
    errors = np.sqrt(2 * (rest**2).sum((1, 2)) / freedom / REPEATS)[:, None]
    return 2 * stdtr(freedom, -np.abs(differences) / errors)


def simulate(kind: str, effects: np.ndarray, seed: int) -> dict[str, float]:
    """Shares: sweeps with a false claim, differences found, rows named noisy."""
    random, rows = np.random.default_rng(seed), len(effects)
    truth = np.sign(effects[1:])
    told: dict[str, list[np.ndarray]] = {"report": [], "pooled": [], "named": []}
    for _ in range(SWEEPS // TOGETHER):
        each = noises(kind, rows, random)[:, None] * random.normal(size=(TOGETHER, REPEATS, rows))
        logs = effects + 0.05 * random.normal(size=(TOGETHER, REPEATS, 1)) + each
        differences = (logs[..., 1:] - logs[..., :1]).mean(1)
        noise = Noise(logs)
        chances = [
            chance_beyond(differences[:, n - 1], noise.sums([0, n]), noise.scale, REPEATS)
            for n in range(1, rows)
        ]
        told["report"].append(claims(np.stack(chances, 1), differences))
        told["pooled"].append(claims(pooled(logs, differences), differences))
        told["named"].append(np.stack([noise.is_noisy(n) for n in range(rows)], 1))
    found: dict[str, float] = {}
    for name in ("report", "pooled"):
        claimed = np.concatenate(told[name])
        found[f"{name}_error"] = float(((claimed != 0) & (claimed != truth)).any(1).mean())
        right = (claimed == truth)[:, truth != 0]
        found[f"{name}_power"] = float(right.mean()) if right.size else math.nan
    named = np.concatenate(told["named"])
    return found | {
        "named": float(named[:, -1].mean()),
        "named_of_others": float(named[:, :-1].any(1).mean()),
    }


def measure(kind: str, rows: int) -> dict[str, float]:
    """One kind of noise and number of rows, the baseline among them."""
    half = np.array([math.log((1.1, 0.9)[n // 2 % 2]) if n % 2 else 0.0 for n in range(rows)])
    if kind == "one noisy":
        half[-1] = 0.0
    null, some = simulate(kind, 0 * half, 1), simulate(kind, half, 2)
    return {
        "error": null["report_error"],
        "error_among_others": some["report_error"],
        "power": some["report_power"],
        "pooled_error": max(null["pooled_error"], some["pooled_error"]),
        "pooled_power": some["pooled_power"],
        "named": null["named"],
        "named_of_others": null["named_of_others"],
    }


def main() -> None:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", help="a file for what is printed")
    asked = parser.parse_args()
    if asked.out:
        writable(parser, asked.out)
    found = {kind: {rows: measure(kind, rows) for rows in ROWS} for kind in KINDS}
    record = {"sweeps": SWEEPS, "repeats": REPEATS, "noise": NOISE, "difference": 0.1, **found,
              "machine": machine(), "environment": provenance()}  # fmt: skip
    text = json.dumps(record, indent=2)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
