"""What `sweep.repeats=auto` claims, finds and costs in simulated sweeps, and what outliers hide.

python benchmarks/report_power_auto.py [results/report_power_auto.json] [--sweeps 2000] [--only 2 %]

Twelve rows, at most ten repeats, every other round reversed. `A/A`: nothing differs. `mixed`: three
rows equal the baseline, the others differ by +-3, +-5, +-10, +20 and +30 %. All decisions are those
of eke's own functions. `false` is the share of sweeps with a row called faster or slower that is
not, `found` of differences of 10 % and more that are, `repeats` the mean of a configuration.
`contradicted` is the share of rows decided by a look that the last test of all runs, at the same
level, leaves open. `forecast` is the share of rows that were decided by the forecast of repeats, of
rows with one of at most 16 after four repeats (looks to 24).
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
from arguments import writable
from provenance import machine, provenance

from eke.results.report.compare.outliers import find_outliers
from eke.results.report.compare.statistics import ALPHA, Compared, correct
from eke.results.report.compare.until_decided import Decision, Rule, State, decide

ROWS, MOST, FIRST = 12, 10, 3
MIXED = np.log([1, 1, 1, 1, 1.03, 0.97, 1.05, 0.95, 1.1, 0.9, 1.2, 1.3])
NULL = 0 * MIXED
TEN = math.log(1.09)
"""Differences above it are of 10 % and more; 0.9 is 10.5 % as a logarithm."""

Seen = dict[int, dict[int, float]]
"""Row -> repeat -> speed; row 0 is the baseline."""


def world(
    random: np.random.Generator, effects: np.ndarray, noise: float, kind: str, most: int = MOST
) -> tuple[np.ndarray, np.ndarray]:
    """True and measured logarithms of one sweep, (rows) and (repeats, rows)."""
    deviations = np.full(ROWS, noise)
    if kind == "unequal":
        deviations = deviations * np.exp(0.5 * random.normal(size=ROWS))
    truth = np.concatenate([[0.0], random.permutation(effects[1:])])
    logs = truth + deviations * random.normal(size=(most, ROWS))
    if kind == "drift 15 %":  # over 36 runs, linear
        for repeat in range(most):
            place = np.arange(ROWS) if repeat % 2 == 0 else np.arange(ROWS)[::-1]
            logs[repeat] -= 0.15 / 36 * (repeat * ROWS + place)
    if kind == "outliers 4 %":
        slow = np.log(1 - random.choice([0.3, 0.5, 0.7], size=logs.shape))
        logs += np.where(random.random(logs.shape) < 0.04, slow, 0.0)
    return truth, logs


def tested(seen: Seen) -> Seen:
    """The speeds that are tested: without excluded runs."""
    out = find_outliers(seen)
    return {k: {r: v for r, v in row.items() if out.get(k) != r} for k, row in seen.items()}


def until_decided(logs: np.ndarray, rule: Rule) -> tuple[list[dict[int, Decision]], Seen]:
    """Decisions after each look, and the speeds that were measured."""
    seen: Seen = {key: {} for key in range(ROWS)}
    known: dict[int, Decision] = {}
    looks = []
    for repeat in range(rule.max_repeats):
        due = [k for k in range(1, ROWS) if not (k in known and known[k].stops)]
        if not due:
            break
        for key in (0, *due):
            seen[key][repeat] = math.exp(logs[repeat, key])
        if repeat + 1 >= FIRST:
            known = decide(tested(seen), 0, rule, known)
            looks.append(known)
    return looks, seen


def signs(seen: Seen, level: float) -> np.ndarray:
    """Sign of each difference that the report resolves at this level, else 0."""
    compared = Compared(seen)
    found = {k: compared.difference((0, k)) for k in range(1, ROWS)}
    ratios = correct({k: each for k, each in found.items() if each}, level)
    sign = {"higher": 1, "lower": -1}
    return np.array([sign.get(ratios[k].decision.name, 0) for k in range(1, ROWS)])


def measure(kind: str, effects: np.ndarray, noise: float, sweeps: int) -> dict[str, float]:
    """Shares of one kind of sweep: `auto`, and all ten repeats with outliers excluded or not."""
    random = np.random.default_rng(47)
    false, found, repeats, contradicted, fixed, kept = [], [], [], [], [], []
    for _ in range(sweeps):
        truth, logs = world(random, effects, noise, kind)
        looks, seen = until_decided(logs, Rule(MOST))
        sign = {State.higher: 1, State.lower: -1}
        last = np.array([sign.get(looks[-1][k].state, 0) for k in range(1, ROWS)])
        true, large = np.sign(truth[1:]), np.abs(truth[1:]) > TEN
        false.append(((last != 0) & (last != true)).any())
        found += list((last == true)[large])
        repeats.append(sum(map(len, seen.values())) / ROWS)
        again = signs(tested(seen), Rule(MOST).level)
        contradicted += list((again != last)[last != 0])
        if kind.startswith("outliers"):
            whole = {k: dict(enumerate(np.exp(logs[:, k]))) for k in range(ROWS)}
            fixed += list((signs(tested(whole), ALPHA) == true)[large])
            kept += list((signs(whole, ALPHA) == true)[large])
    shares = {"false": false, "found": found, "contradicted": contradicted,
              "found_by_ten": fixed, "found_by_ten_with_outliers": kept}  # fmt: skip
    means = {name: round(float(np.mean(values)), 4) for name, values in shares.items() if values}
    return means | {"repeats": round(float(np.mean(repeats)), 2)}


def forecasts(noise: float, sweeps: int) -> dict[str, float]:
    """Share of open rows with a forecast of up to 16 repeats that are decided by then."""
    random, rule = np.random.default_rng(48), Rule(24)
    kept = []
    for _ in range(sweeps):
        _, logs = world(random, MIXED, noise, "equal", rule.max_repeats)
        looks, _ = until_decided(logs, rule)
        for key, first in looks[1].items():  # after four repeats
            if first.state is State.open and first.forecast and first.forecast <= 16:
                by = looks[min(first.forecast - FIRST, len(looks) - 1)]
                kept.append(by[key].state.is_decided)
    return {"decided_by_then": round(float(np.mean(kept)), 4), "rows": len(kept)}


def main() -> None:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", help="a file for what is printed")
    parser.add_argument("--sweeps", type=int, default=2000, help="of each kind")
    parser.add_argument("--only", default="", help="kinds with this text in their name")
    asked = parser.parse_args()
    if asked.out:
        writable(parser, asked.out)
    kinds = [("A/A", NULL, noise, "equal") for noise in (0.01, 0.02, 0.05)]
    kinds += [("mixed", MIXED, noise, "equal") for noise in (0.01, 0.02, 0.05)]
    kinds += [(name, effects, 0.02, kind) for kind in ("unequal", "drift 15 %", "outliers 4 %")
              for name, effects in (("A/A", NULL), ("mixed", MIXED))]  # fmt: skip
    found = {}
    for name, effects, noise, kind in kinds:
        title = f"{name}, {kind}, {100 * noise:.0f} %"
        if asked.only in title:
            found[title] = measure(kind, effects, noise, asked.sweeps)
            print(title, found[title], flush=True)
    if asked.only in "forecast":
        found["forecast, 2 %"] = forecasts(0.02, asked.sweeps)
        print("forecast", found["forecast, 2 %"], flush=True)
    level = Rule(MOST).level
    record = {"sweeps": asked.sweeps, "rows": ROWS, "most": MOST, "level": level, **found,
              "machine": machine(), "environment": provenance()}  # fmt: skip
    if asked.out:
        asked.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
