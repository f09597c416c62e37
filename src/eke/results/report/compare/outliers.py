"""Runs excluded from tests: one slow run of a configuration whose other repeats agree."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from eke.common.text import format_number
from eke.results.report.compare.measures import SAMPLES
from eke.results.report.compare.statistics import K, Sample
from eke.results.report.compare.variants import Variant

LEAST, FAR, NEAR = 4, 8.0, 4.0
"""Repeats that a configuration needs, robust standard deviations of all by which a run must be
slower, and deviations within which the others agree. Chosen by simulation, as SLOWER: 4 % of runs
that are 30 to 70 % slow hide 42 % of differences of 10 % from ten repeats, and then 9 %."""

SLOWER = math.log(1.15)


def find_outliers(samples: Mapping[K, Sample]) -> dict[K, Any]:
    """Return the excluded repeat of each configuration with one, by samples of speeds."""
    rows = [key for key, sample in samples.items() if sample]
    repeats = list(dict.fromkeys(repeat for key in rows for repeat in samples[key]))
    if len(repeats) < LEAST:
        return {}
    logs: Any = np.log([[samples[key].get(each, math.nan) for key in rows] for each in repeats])
    rest = logs - np.nanmedian(logs, axis=0)
    rest -= np.nanmedian(rest, axis=1, keepdims=True)  # slow for all: not this run
    sigma = 1.4826 * np.nanmedian(np.abs(rest)) + 1e-9  # of equal values
    found = {}
    for key, own in zip(rows, rest.T, strict=True):
        if len(samples[key]) >= LEAST:
            worst = int(np.nanargmin(own))
            agree = np.nanmax(np.abs(np.delete(own, worst))) <= NEAR * sigma
            if agree and own[worst] < -max(FAR * sigma, SLOWER):
                found[key] = repeats[worst]
    return found


def without_outliers(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants with their `excluded` repeats, by machine and group."""
    samples: dict[Hashable, dict[Variant, Sample]] = {}
    for v in variants:
        samples.setdefault((v.machine, v.work), {})[v] = v.sample(SAMPLES.key)
    found = {v: repeat for part in samples.values() for v, repeat in find_outliers(part).items()}
    return [replace(v, excluded=found[v]) if v in found else v for v in variants]


def outlier_notes(variants: Sequence[Variant]) -> list[str]:
    """Return a note on each excluded run."""
    number = format_number(sum(len(v.records) for v in variants), "run")
    return [
        f"1 of {number} excluded from the tests of speed: {v.label} with seed={v.excluded[0]} "
        f"repeat={v.excluded[1]}, whose other repeats are faster and agree"
        for v in variants if v.excluded
    ]  # fmt: skip
