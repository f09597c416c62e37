"""Claims of 250 made-up record sets with planted truth, recomputed from the runs by other code."""

import math
from statistics import fmean

import numpy as np
import pytest
from scipy import stats
from unit.results.report.made import MIB, Run, make_record

from eke.results.report.compare import comparison
from eke.results.report.compare.claims import Kind, find_claims, verdict_lines
from eke.results.report.compare.load_records import Entry, Gathered
from eke.results.report.compare.statistics import Significance

SETS = 250

pytestmark = pytest.mark.slow

SPEED, PEAK = "throughput.samples_per_s", "memory.measured.peak_allocated_bytes"
GAINS = (1.0, 1.0, 1.0, 1.0, 1.02, 1.1, 0.9, 1.3, 0.7, 2.0)
FATES = ("ok",) * 12 + ("oom", "crashed", "not run")


class Planted:
    """One sweep: what is true of each row, and its runs, by the row's learning rate."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        rows = int(
            random.choice(
                [2, 3, 4, 5, 6, 8, 12, 20, 40, 60],
                p=[0.15] * 4 + [0.14] * 2 + [0.05] * 2 + [0.01] * 2,
            )
        )
        repeats, noise = int(random.choice([1, 2, 3, 3, 4, 5])), random.choice([0.005, 0.02, 0.05])
        kind = random.choice(["equal", "lognormal", "one noisy"])
        sigma = noise * (
            np.exp(0.5 * random.normal(size=rows)) if kind == "lognormal" else np.ones(rows)
        )
        sigma[-1] *= 5 if kind == "one noisy" else 1
        if random.random() < 0.3:  # nothing differs
            self.speed, self.peak = np.ones(rows), np.ones(rows)
        else:
            self.speed, self.peak = random.choice(GAINS, rows), random.choice(GAINS, rows)
        worse = random.random(rows) < 0.15
        worse[0] = False
        self.loss = np.where(worse, 1.2, 1.0)
        drift = np.exp(random.choice([0.0, 0.1, 0.5]) * random.normal(size=repeats))
        exact = random.random() < 0.5
        self.runs = {}
        for n in range(rows):
            held = repeats if random.random() < 0.8 else int(random.integers(1, repeats + 1))
            for repeat in range(repeats):
                fate = random.choice(FATES) if repeat < held else "not run"
                if n == 0 and repeat == 0:
                    fate = "ok"
                e = random.normal(size=3)
                peak = self.peak[n] * (1 if exact else math.exp(sigma[n] * e[1]))
                self.runs[n, repeat] = Run(
                    {}, repeat=repeat, seed=repeat, outcome=str(fate),
                    keys={"optimizer.lr": 1e-5 * (n + 1)}, peak=int(100 * MIB * peak),
                    speed=float(100 * self.speed[n] * drift[repeat] * math.exp(sigma[n] * e[0])),
                    loss=float(2 * self.loss[n] * math.exp(0.001 * e[2])),
                )  # fmt: skip

    def values(self, n, key):
        """Repeat -> value of the runs that ended well."""
        return {
            repeat: run.speed if key == SPEED else run.peak
            for (row, repeat), run in self.runs.items() if row == n and run.outcome == "ok"
        }  # fmt: skip

    def ratio(self, n, key):
        """Of row n over row 0: of shared repeats, or of means where three each share too few."""
        base, other = self.values(0, key), self.values(n, key)
        shared = sorted(base.keys() & other.keys())
        if len(shared) >= 3 or (shared and min(len(base), len(other)) < 3):
            base, other = ({r: side[r] for r in shared} for side in (base, other))
        return math.exp(fmean(map(math.log, other.values())) - fmean(map(math.log, base.values())))


@pytest.fixture(scope="module")
def sets():
    """Each planted set with its comparison, without a disk, and what that claims."""
    found, patch = [], pytest.MonkeyPatch()
    for seed in range(SETS):
        planted = Planted(seed)
        entries = []
        for number, run in enumerate(planted.runs.values()):
            record = None if run.outcome == "not run" else make_record(f"{number:016x}", run)
            entries.append(Entry(run.typed, run.outcome, record=record))
        gathered = Gathered(tuple(entries), (), (), ())
        patch.setattr(comparison, "gather", lambda _, g=gathered: g)
        result = comparison.compare_runs([])
        planted.rows = {number_of(row): row for row in result.rows if row.estimates}
        planted.decided = {key: by_holm(planted, key) for key in (SPEED, PEAK)}
        planted.worse = {n for n in planted.rows if n and is_worse(planted, n)}
        found.append((planted, result, find_claims(result)))
    patch.undo()
    return found


def number_of(row):
    return round(float(row.variant.settings["optimizer.lr"]) / 1e-5) - 1


def is_right(planted, claim, every):
    """Whether a claim follows from the runs."""
    good = [n for n in range(len(planted.speed)) if planted.values(n, SPEED)]
    rows, others = [number_of(row) for row in claim.rows], [n for n in good if n != 0]
    if claim.kind in (Kind.nothing, Kind.none_well, Kind.no_baseline, Kind.no_speed, Kind.other):
        return False  # none was planted
    if claim.kind is Kind.only_one:
        return good == rows
    if claim.kind is Kind.unquiet:
        speeds = planted.values(0, SPEED).values()
        wide = max(speeds) / min(speeds)
        return every[0] is claim and rows == [0] and wide > 1.3
    key, sign = claim.measure.key, -1 if claim.measure.key == PEAK else 1
    values = {n: planted.ratio(n, key) for n in others}
    decided, worse = planted.decided[key], planted.worse & set(others)
    shown = [n for n in others if decided[n] == sign]
    top = max([n for n in shown if n not in worse], key=lambda n: sign * values[n], default=None)
    if claim.kind in (Kind.ahead, Kind.peers):
        before = [c for c in every if c.kind is Kind.best and c.measure is claim.measure]
        above = {n for n in others if sign * values[n] > sign * values[top] and n not in worse}
        known = set(others) - worse - {top}
        return bool(before) and (
            set(rows) == above if claim.kind is Kind.ahead else set(rows) <= known
        )
    told = claim.ratios[0]
    is_decided = told.decision in (Significance.higher, Significance.lower)
    if told.value != pytest.approx(values[rows[0]]) or is_decided != bool(decided[rows[0]]):
        return False
    if told.low is not None and not told.low <= told.value <= told.high:
        return False
    if claim.kind is Kind.best:
        over = [n for n in others if sign * values[n] > sign * values[top]]
        limits = claim.is_limited == bool(worse & set(over)), claim.is_first == (set(over) <= worse)
        return values[rows[0]] == pytest.approx(values[top]) and all(limits)
    if claim.kind is Kind.at_worse_loss:
        return top is None and rows[0] in worse and rows[0] in shown
    highest = values[rows[0]] == pytest.approx(sign * max(sign * v for v in values.values()))
    few = all(min(len(planted.values(0, key)), len(planted.values(n, key))) < 3 for n in others)
    return not shown and highest and (few if claim.kind is Kind.few else not few)


def by_holm(planted, key):
    """Row -> -1, 0 or 1: whether its difference holds among all, by Holm's method."""
    ratios = {n: row.ratios[key] for n, row in planted.rows.items() if key in row.ratios}
    tested = sorted(
        (n for n, each in ratios.items() if each.p is not None), key=lambda n: ratios[n].p
    )
    varying = [planted.values(n, key) for n in (0, *ratios)]
    if sum(len(v) >= 3 and len(set(v.values())) > 1 for v in varying) < 4:  # each by itself
        for n in tested:
            alone = by_t(planted.values(0, key), planted.values(n, key))
            assert alone is None or ratios[n].p == pytest.approx(alone, abs=1e-9)
    found = dict.fromkeys(planted.rows, 0)
    for rank, n in enumerate(tested):
        if ratios[n].p > 0.05 / (len(tested) - rank):
            break
        same = ratios[n].low >= 0.98 and ratios[n].high <= 1.02
        found[n] = 0 if same else 1 if ratios[n].value > 1 else -1
    return found


def by_t(base, other):
    """Student's t of three shared repeats or more, by scipy; None where values do not vary."""
    shared = sorted(base.keys() & other.keys())
    logs = [math.log(other[r] / base[r]) for r in shared]
    return None if len(logs) < 3 or len(set(logs)) == 1 else stats.ttest_1samp(logs, 0.0).pvalue


def is_worse(planted, n):
    """A loss that is shown to be more than 1 % higher: paired by seed."""
    losses = [
        {r: run.loss for (row, r), run in planted.runs.items() if row == m and run.outcome == "ok"}
        for m in (0, n)
    ]  # fmt: skip
    shared = sorted(losses[0].keys() & losses[1].keys())
    if len(shared) < 3:
        first, second = ([math.log(v) for v in side.values()] for side in losses)
        if min(len(first), len(second)) < 3:
            return False
        found = stats.ttest_ind(second, first, equal_var=False).confidence_interval()
    else:
        logs = [math.log(losses[1][r] / losses[0][r]) for r in shared]
        found = stats.ttest_1samp(logs, 0.0).confidence_interval()
    return math.exp(found.low) > 1.01


def test_every_claim_follows_from_the_records(sets):
    wrong, kinds = [], set()
    for number, (planted, found, told) in enumerate(sets):
        kinds |= {claim.kind for claim in told}
        wrong += [(number, claim.kind, claim.measure.key) for claim in told
                  if not is_right(planted, claim, told)]  # fmt: skip
        assert all(isinstance(line, str) and line for line in verdict_lines(found))
    assert not wrong
    assert {Kind.best, Kind.ahead, Kind.peers, Kind.not_better, Kind.few, Kind.unquiet,
            Kind.only_one, Kind.at_worse_loss} <= kinds  # fmt: skip


def test_claims_of_difference_hold_in_nineteen_sets_of_twenty(sets):
    false = 0
    for planted, found, told in sets:
        false += any(contradicts(planted, claim, told, found) for claim in told)
    assert false <= 0.05 * SETS


def contradicts(planted, claim, told, found):
    """Whether a difference is claimed that was not planted: from the baseline, or from others."""
    sign, truth = (-1, planted.peak) if claim.measure.key == PEAK else (1, planted.speed)
    if claim.kind not in (Kind.best, Kind.at_worse_loss):
        return False
    top = number_of(claim.rows[0])
    if sign * truth[top] <= sign * truth[0] * (1 + 1e-9 * sign):
        return True
    if claim.kind is Kind.at_worse_loss:
        return planted.loss[top] <= 1.01
    left = {number_of(r) for c in told if c.measure is claim.measure
            and c.kind in (Kind.peers, Kind.ahead) for r in c.rows}  # fmt: skip
    compared = {number_of(r) for r in found.rows if claim.measure.key in r.ratios
                and number_of(r) not in planted.worse}  # fmt: skip
    return any(sign * truth[n] >= sign * truth[top] for n in compared - left - {top})
