"""What a report finds in simulated sweeps, and how often it claims what is not there.

python benchmarks/report_power.py [--sweeps 2000] [--only losses_alike ...] [--seed 1]
                                  [--out results/report_power.json]
                                  [--docs notes/report_statistics.md]

Each function of ROWS simulates one row of the table and returns its lines. Everything is decided
by eke's own functions. Row 0 is the baseline. Noise is the standard deviation of the logarithm of
one run; a claim is false if its direction is not that of the planted difference, and the share is
that of sweeps with at least one false claim. `--only` keeps the other lines of the file.
"""

import argparse
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from arguments import at_least, writable
from compare_power import alarms
from provenance import machine, provenance
from report_power_auto import auto_alike, auto_forecasts, auto_found, outliers_found
from report_power_lines import Array, Line, Random, percent

from eke.results.report.compare.losses import LossComparison, Parity, compare_samples
from eke.results.report.compare.measures import EVAL_LOSS, METRIC
from eke.results.report.compare.statistics import (
    ALPHA,
    Compared,
    Ratio,
    Significance,
    correct,
)

BEGIN, END = "<!-- report_power.py -->\n", "<!-- report_power.py ends -->\n"
"""Of the generated table in the page."""

DIRECTIONS = (Parity.better, Parity.worse)
ONE = math.log1p(0.01)


def noise_of(kind: str, shape: tuple[int, int, int], noise: float, random: Random) -> Array:
    """Noise of all runs, (sweeps, repeats, rows): equal, lognormal (0.5), or one row's 5 times."""
    sweeps, _, rows = shape
    sigma = np.full((sweeps, 1, rows), noise)
    if kind == "lognormal":
        sigma = sigma * np.exp(0.5 * random.normal(size=sigma.shape))
    elif kind != "equal":
        sigma[..., 0 if kind == "noisy baseline" else -1] *= 5
    return sigma * random.normal(size=shape)


def half_of(rows: int, difference: float) -> Array:
    """Logarithms of the effects: every other row differs, up and down in turns."""
    effects = np.zeros(rows)
    effects[1::2] = [math.log1p(difference * (-1) ** (k // 2)) for k in range(1, rows, 2)]
    return effects


# --- losses and metrics ---------------------------------------------------------------------------


def judged(
    values: Array, trainings: Sequence[int] | None = None, key: str = "", evaluated: int = 0
) -> dict[int, LossComparison]:
    """Comparisons of one sweep's losses, (seeds, rows), with the first row."""
    rows = range(values.shape[1])
    samples = {row: dict(enumerate(values[:, row].tolist())) for row in rows}
    same = dict(enumerate(trainings if trainings is not None else rows))
    return compare_samples(key or EVAL_LOSS.key, samples, same, ALPHA, evaluated)


def signs(found: dict[int, LossComparison]) -> Array:
    """Claimed direction of each row but the baseline: -1, 0 or 1."""
    return np.array([
        (1 if each.estimate > 0 else -1) if each.parity in DIRECTIONS else 0
        for _, each in sorted(found.items())
    ])  # fmt: skip


def false_share(logs: Array, truth: Array, trainings: Sequence[int] | None = None) -> float:
    """Sweeps with a false direction, in per cent."""
    found = [signs(judged(np.exp(each), trainings)) for each in logs]
    wrong = [bool(((told != 0) & (told != np.sign(truth[1:]))).any()) for told in found]
    return percent(sum(wrong), len(logs))


def losses_alike(sweeps: int, random: Random) -> Iterator[Line]:
    """Nothing differs; three seeds."""
    what = "losses, nothing differs: false *lower* or *higher*"
    settings: list[tuple[str, float, float]] = [
        ("equal", noise, shared) for noise in (0.005, 0.02, 0.05) for shared in (0.0, 1.0)
    ]
    settings += [(kind, 0.02, 0.0) for kind in ("lognormal", "one noisy", "noisy baseline")]
    for kind, noise, shared in settings:
        is_noisy = "noisy" in kind
        for rows in (4, 12, 30):
            shape = sweeps, 3, rows
            logs = noise_of(kind, shape, noise, random)
            logs += shared * noise * random.normal(size=(sweeps, 3, 1))
            setting = f"{rows} rows, {kind}, {noise:.1%}{', shared' if shared else ''}"
            told = f"{what}{' (one row or the baseline 5 x)' if is_noisy else ''}"
            bound = 7.5 if is_noisy else 5.0
            yield Line("losses_alike", told, setting, false_share(logs, np.zeros(rows)), bound)


SIZES = ((12, 2), (12, 4), (12, 6), (30, 5))
"""Rows, and rows of a training."""


def of_trainings(
    sweeps: int, rows: int, size: int, own: float, noise: float, random: Random
) -> Array:
    """Logarithms of losses where rows of a training share all but `own` of the variance."""
    each = random.normal(size=(sweeps, 3, math.ceil(rows / size)))
    shared = np.repeat(each, size, -1)[..., :rows]
    rest = random.normal(size=(sweeps, 3, rows))
    logs: Array = noise * (math.sqrt(1 - own) * shared + math.sqrt(own) * rest)
    return logs


def trainings_alike(sweeps: int, random: Random) -> Iterator[Line]:
    """Nothing differs, and rows of a training share their noise but for rounding."""
    for rows, size in SIZES:
        for own in (0.0001, 0.05):
            for noise in (0.02, 0.05):
                logs = of_trainings(sweeps, rows, size, own, noise, random)
                value = false_share(logs, np.zeros(rows), np.arange(rows) // size)
                setting = f"{rows} rows, trainings of {size}, own {own:.2%}, {noise:.0%}"
                yield Line("trainings_alike", "the same, rows in trainings of 2 to 6",
                           setting, value, 6.5)  # fmt: skip


def one_apart(sweeps: int, random: Random) -> Iterator[Line]:
    """One row truly 6 % higher than the others of its training: another's, or the baseline's."""
    what = "one row of a training truly +6 %, noise 0.5 %"
    for size, least in ((2, 95.0), (4, 70.0), (6, 70.0)):
        for own in (0.0001, 0.05):
            for place, of in ((2 * size - 1, "another training"), (size - 1, "the baseline's")):
                truth = np.zeros(12)
                truth[place] = math.log(1.06)
                found = false = 0
                for each in of_trainings(sweeps, 12, size, own, 0.005, random) + truth:
                    told = signs(judged(np.exp(each), np.arange(12) // size))
                    found += told[place - 1] == 1
                    false += bool(np.delete(told, place - 1).any())
                setting = f"trainings of {size}, own {own:.2%}, of {of}"
                told = f"{what}: found, trainings of {'2' if size == 2 else '4 and 6'}"
                yield Line("one_apart", told, setting, percent(found, sweeps), least, True)
                yield Line("one_apart", f"{what}: false claims about other rows", setting,
                           percent(false, sweeps), 8.0)  # fmt: skip


def losses_within(sweeps: int, random: Random) -> Iterator[Line]:
    """Half of the rows truly differ: what is called the same, or no worse, and is not."""
    what = "losses, half of the rows truly +-2, 3, 5 %: false *within 1 %* or *at most 1 % higher*"
    for noise in (0.005, 0.015, 0.05):
        for difference in (0.02, 0.03, 0.05):
            truth, false = half_of(12, difference), 0
            for each in noise_of("equal", (sweeps, 3, 12), noise, random) + truth:
                found = judged(np.exp(each))
                false += any(
                    (one.parity is Parity.within and abs(truth[row]) > ONE)
                    or (one.parity is Parity.no_worse and truth[row] > ONE)
                    for row, one in found.items()
                )
            setting = f"12 rows, {noise:.1%}, {difference:.0%}"
            yield Line("losses_within", what, setting, percent(false, sweeps), 2.0)


def losses_found(sweeps: int, random: Random) -> Iterator[Line]:
    """Half of the rows truly differ: how many are found."""
    for seeds, noise, difference, least in (
        (3, 0.005, 0.02, 75.0), (3, 0.005, 0.03, 95.0), (3, 0.015, 0.05, 50.0),
        (5, 0.015, 0.05, 88.0),
    ):  # fmt: skip
        truth, found = half_of(12, difference), 0.0
        some = truth[1:] != 0
        logs = noise_of("equal", (sweeps, seeds, 12), noise, random) + truth
        for each in logs:
            found += float((signs(judged(np.exp(each))) == np.sign(truth[1:]))[some].mean())
        what = f"losses, 12 rows, {seeds} seeds: {difference:.0%} found at {noise:.1%}"
        yield Line("losses_found", what, "", percent(found, sweeps), least, True)


def accuracies_alike(sweeps: int, random: Random) -> Iterator[Line]:
    """Accuracies of equal classifiers on few examples."""
    what = "accuracy on 20, 50, 200 examples, nothing differs: false claims"
    for examples in (20, 50, 200):
        for rows in (4, 12):
            for chance in (0.5, 0.8, 0.95):
                values = random.binomial(examples, chance, size=(sweeps, 3, rows)) / examples
                key = f"{METRIC}accuracy"
                false = sum(bool(signs(judged(v, None, key, examples)).any()) for v in values)
                setting = f"{examples} examples, {rows} rows, accuracy {chance}"
                yield Line("accuracies_alike", what, setting, percent(false, sweeps), 5.0)


# --- speeds ---------------------------------------------------------------------------------------


def ratios_of(values: Array) -> dict[int, Ratio]:
    """Tested ratios of one sweep's speeds, (repeats, rows), to the first row."""
    rows = range(values.shape[1])
    compared = Compared({row: dict(enumerate(values[:, row].tolist())) for row in rows})
    pairs = {row: compared.difference((0, row)) for row in rows if row}
    return correct({row: each for row, each in pairs.items() if each})


def speeds_found(sweeps: int, random: Random) -> Iterator[Line]:
    """Speeds of three repeats, half of the rows +-10 %, 2 % noise and what a repeat shares."""
    for kind in ("equal", "lognormal", "one noisy"):
        for rows in (4, 12, 30):
            truth, shape = half_of(rows, 0.1), (sweeps, 3, rows)
            if kind == "one noisy":
                truth[-1] = 0.0
            logs = noise_of(kind, shape, 0.02, random) + truth
            logs += 0.05 * random.normal(size=(sweeps, 3, 1))
            found = false = hold = 0.0
            for each in logs:
                wrong, held, right = [], True, []
                for row, one in ratios_of(np.exp(each)).items():
                    sign = {Significance.higher: 1, Significance.lower: -1}.get(one.decision, 0)
                    wrong.append(bool(sign) and sign != np.sign(truth[row]))
                    held &= one.low <= math.exp(truth[row]) <= one.high
                    right += [sign == np.sign(truth[row])] if truth[row] else []
                found, false, hold = found + float(np.mean(right)), false + any(wrong), hold + held
            what, setting = "speeds, 3 repeats, half +-10 % at 2 %", f"{rows} rows, {kind}"
            if (kind, rows) == ("equal", 12):
                yield Line("speeds_found", f"{what}, 12 rows: found", setting,
                           percent(found, sweeps), 90.0, True)  # fmt: skip
            unequal = "" if kind == "equal" else ", unequal noise"
            told, bound = ("false, one row 5 x", 7.5) if kind == "one noisy" else ("false", 5.0)
            share = percent(false, sweeps)
            yield Line("speeds_found", f"{what}: {told}", setting, share, bound)
            yield Line("speeds_found", f"{what}{unequal}: all intervals of a sweep hold", setting,
                       percent(hold, sweeps), 92.0 if unequal else 94.0, True)  # fmt: skip


def compare_alarms(sweeps: int, random: Random) -> Iterator[Line]:
    """`eke compare` of two sides measured in turns, 2 % noise: alarms."""
    for repeats, least in ((3, 60.0), (5, 90.0)):
        for slower, bound in ((0.0, 2.0), (0.1, 99.0), (0.05, least)):
            value = 100 * alarms(repeats, slower, sweeps=sweeps, seed=int(random.integers(2**31)))
            what = f"{slower:.0%} slower found, {repeats} repeats" if slower else "false alarms"
            told, setting = f"`eke compare`, 2 % noise: {what}", f"{repeats} repeats"
            yield Line("compare_alarms", told, setting, value, bound, is_least=slower > 0)


ROWS: tuple[Callable[[int, Random], Iterable[Line]], ...] = (
    losses_alike, trainings_alike, one_apart, losses_within, losses_found, accuracies_alike,
    speeds_found, auto_alike, auto_found, outliers_found, auto_forecasts,
    compare_alarms,
)  # fmt: skip
"""One function for each row of the table; each has random numbers of its own."""


def table(lines: Sequence[Line]) -> str:
    """The page's table: of each share the worst of its settings, and the bound."""
    groups: dict[tuple[str, float], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.what, line.bound), []).append(line)
    text = "| simulated | settings x sweeps | result | bound |\n| --- | --- | --- | --- |\n"
    for (what, bound), group in groups.items():
        is_least, unit = group[0].is_least, f" {group[0].unit}".rstrip()
        worst = (min if is_least else max)(line.value for line in group)
        sign, most = (">=", "least") if is_least else ("<=", "most")
        shown = f"{worst:.1f}{unit}" if len(group) == 1 else f"at {most} {worst:.1f}{unit}"
        what = re.sub(r"(?<=\d)%", " %", what)
        size = f"{len(group)} x {min(line.sweeps for line in group):,}"
        text += f"| {what} | {size} | {shown} | {sign} {bound:g}{unit} |\n"
    return text


def simulate(names: Sequence[str], sweeps: int, seed: int) -> Iterator[Line]:
    """Lines of the named rows, printed as they come."""
    for row in ROWS:
        if names and row.__name__ not in names:
            continue
        random = np.random.default_rng([seed, zlib.crc32(row.__name__.encode())])
        for line in row(sweeps, random):
            verdict, sign = "right" if line.is_right else "WRONG", ">=" if line.is_least else "<="
            told = f"{verdict}  {line.value:6.1f} {sign} {line.bound:g}"
            print(f"{told}  {line.what}: {line.setting}", flush=True)
            yield replace(line, sweeps=sweeps)


def write_table(page: Path, lines: Sequence[Line]) -> None:
    """Replace the page's generated table."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table(lines)}\n{END}{after}")


def main() -> None:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sweeps", type=at_least(20), default=2000, help="of each kind")
    parser.add_argument("--only", nargs="*", default=[], choices=[r.__name__ for r in ROWS])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file for the lines")
    parser.add_argument("--docs", type=Path, help="a page with the table")
    asked = parser.parse_args()
    if asked.out:
        writable(parser, asked.out)
    lines = list(simulate(asked.only, asked.sweeps, asked.seed))
    if asked.out and asked.only and asked.out.exists():
        kept = [Line(**each) for each in json.loads(asked.out.read_text())["lines"]]
        kept = [line for line in kept if line.row not in asked.only]
        order = [row.__name__ for row in ROWS]
        lines = sorted([*kept, *lines], key=lambda line: order.index(line.row))
    if asked.out:
        record = {"seed": asked.seed, "lines": list(map(asdict, lines)),
                  "machine": machine(), "environment": provenance()}  # fmt: skip
        asked.out.write_text(json.dumps(record, indent=2) + "\n")
    if asked.docs:
        write_table(asked.docs, lines)
    if wrong := [line for line in lines if not line.is_right]:
        raise SystemExit(f"{len(wrong)} of {len(lines)} bounds do not hold")


if __name__ == "__main__":
    main()
