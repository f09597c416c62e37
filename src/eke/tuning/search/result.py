"""Search result, and its best configuration as an option of the group `experiment`."""

import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.files import write_atomic
from eke.common.paths import conf_folder, program
from eke.config.compose import Composed, compose
from eke.config.compose.catalogue import make_catalogue
from eke.config.compose.compose_cache import PRESETS
from eke.config.schema import LAUNCH_GROUPS
from eke.config.schema.codec import make_converter
from eke.plan.record import Outcome
from eke.rules.techniques import Numerics
from eke.tuning.search.candidates import Candidate, Candidates
from eke.tuning.search.search import OF_MEDIAN, Measured, Search
from eke.tuning.search.search_space import NOISE, Objective, deviation_between

MEMORY_TIE_FRACTION = 0.005
"""Share of the peak below which memory differences are ignored."""


@dataclass(frozen=True)
class _CandidateResult:
    """Result of one measured candidate."""

    candidate: Candidate
    tried: tuple[Measured, ...]
    """Trials with a step time, in their order."""
    between: float
    """Standard deviation of the logarithmic step time between trials of one configuration."""

    @property
    def step_s(self) -> float:
        """Seconds per optimizer step with its share of compiling: median of the trials."""
        return math.exp(statistics.median(_logarithms_of(self.tried)))

    @property
    def error(self) -> float:
        """Standard error of the logarithmic step time."""
        count = len(self.tried)
        one = statistics.median(max(each.trial.spread, self.between, NOISE) for each in self.tried)
        return one * (OF_MEDIAN if count > 2 else 1.0) / math.sqrt(count)  # for two, it is the mean

    @property
    def peak_bytes(self) -> int | None:
        """Highest measured peak of one device."""
        return max((each.trial.peak_bytes or 0 for each in self.tried), default=0) or None


def _logarithms_of(tried: Sequence[Measured]) -> list[float]:
    """Return the logarithmic seconds per optimizer step of the trials."""
    return [math.log(each.trial.step_s) for each in tried if each.trial.step_s]


@dataclass(frozen=True)
class Gain:
    """Gain of the best configuration over the baseline."""

    factor: float
    """Factor in the objective: 2 is twice as fast, half the memory or half the cost."""
    low: float
    """Lower end of the 95 % interval. For memory, which hardly varies, equal to `factor`."""
    high: float
    of: Objective
    """Quantity of the gain. A search for less memory may end with a faster step."""

    @property
    def is_resolved(self) -> bool:
        """True if the gain is significant."""
        return self.low > 1


class Fit:
    """Result of a search."""

    def __init__(
        self, search: Search, candidates: Candidates, trials: Sequence[Measured], numerics: Numerics
    ) -> None:
        self.objective, self.numerics = search.objective, numerics
        self.candidates, self.trials = candidates, tuple(trials)
        tried = {
            number: tuple(each for each in trials if each.number == number and each.trial.step_s)
            for number in search.ranking()
        }
        self.between = deviation_between([_logarithms_of(each) for each in tried.values()])
        """As in each standing."""
        found = candidates.found
        each = {n: _CandidateResult(found[n], those, self.between) for n, those in tried.items()}
        self.standings = tuple(each.values())
        """Measured candidates, the best first."""
        self.typed = None if candidates.first is None else each.get(candidates.first)
        """The baseline. None if it could not be measured."""
        self.further_gain = search.further_gain()
        """Share of the objective that one more trial was expected to gain. 0: too little."""

    @property
    def best(self) -> _CandidateResult | None:
        """Best measured candidate."""
        return self.standings[0] if self.standings else None

    @property
    def gain(self) -> Gain | None:
        """Gain over the baseline. None if it or the best was not measured."""
        return None if self.typed is None else self.gain_over(self.typed)

    @property
    def is_found(self) -> bool:
        """True if the best is significantly better than the baseline, if that could run."""
        if self.best is None or self.best is self.typed:
            return False
        return self.gain is None or self.gain.is_resolved

    @property
    def rivals(self) -> list[_CandidateResult]:
        """Candidates other than the baseline that do not differ significantly from the best."""
        others = [each for each in self.standings[1:] if each is not self.typed]
        gains = [(each, self.gain_over(each)) for each in others]
        return [each for each, gain in gains if gain is not None and not gain.is_resolved]

    def gain_over(self, before: _CandidateResult) -> Gain | None:
        """Return the best candidate's gain over another one, None if it was not measured."""
        after = self.best
        if after is None:
            return None
        if self.objective is Objective.memory:
            if not before.peak_bytes or not after.peak_bytes:
                return None
            factor = before.peak_bytes / after.peak_bytes
            if after is before or factor >= 1 + MEMORY_TIE_FRACTION:
                return Gain(factor, factor, factor, self.objective)
        devices = 1.0
        if self.objective is Objective.cost:
            devices = before.candidate.point.devices / after.candidate.point.devices
        factor = devices * before.step_s / after.step_s
        of = Objective.cost if self.objective is Objective.cost else Objective.speed
        if after is before:
            return Gain(1.0, 1.0, 1.0, of)
        error = 1.96 * math.hypot(before.error, after.error)  # of a 95 % interval
        return Gain(factor, factor * math.exp(-error), factor * math.exp(error), of)


def all_diverge(trials: Sequence[Measured], typed: int | None, numerics: Numerics) -> bool:
    """Return whether the baseline diverged and all candidates differ only by rounding."""
    ended = {each.outcome for each in trials if each.number == typed}
    return numerics is Numerics.same and Outcome.diverged.value in ended


MADE_BY = "eke fit"
"""Text in the first lines of files that may be overwritten."""

_OF_THE_PLACE = (*LAUNCH_GROUPS, "hardware", "paths", "sweep", "tracker")
"""Sections about the place and start of a run, which the next run may change."""


def write_experiment(
    composed: Composed, name: str, config_dir: Path | None, folder: Path, evidence: Sequence[str]
) -> Path:
    """Write the configuration as `experiment/NAME.yaml` into a folder of options. Return its path.

    Raises ConfigError if eke fit did not write a file of that name, OSError if it cannot write.
    """
    path = free_path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, _experiment_text(composed, name, config_dir, evidence), shared=True)
    return path


def free_path(folder: Path, name: str, planning: bool = False) -> Path:
    """Return the path of the option's file. With `planning`, the folder may be read-only.

    Raises ConfigError for an invalid name, a file not written by eke fit or a read-only folder.
    """
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        why = "must be letters, digits and underscores"
        raise ConfigError(Problem("--name", name, why, Fix(remark="--name fastest"), "wrong_type"))
    path, why = folder / "experiment" / f"{name}.yaml", ""
    if path.exists():
        if MADE_BY not in path.read_text(encoding="utf-8"):
            why = f"{path} exists, and was not written by eke fit"
    elif (conf_folder() / "experiment" / path.name).exists():
        why = "eke has an experiment of this name, which takes precedence"
    if why:
        problem = Problem("--name", name, why, Fix(remark=f"--name {name}_fit"), "name_in_use")
        raise ConfigError(problem)
    place = next(each for each in (path.parent, *path.parents) if each.exists())
    if not planning and not os.access(place, os.W_OK):
        why = f"{place} is not writable, and the best configuration is stored there"
        fix = Fix(remark="--config-dir my_conf")
        raise ConfigError(Problem("--config-dir", str(folder), why, fix, "not_writable"))
    return path


def _experiment_text(
    composed: Composed, name: str, config_dir: Path | None, evidence: Sequence[str]
) -> str:
    """Return the file's content: every choice and value other than eke's default."""
    usual = make_catalogue(config_dir).defaults
    chosen = {
        group: option
        for group, option in composed.choices.items()
        if group not in (*PRESETS, *_OF_THE_PLACE) and usual.get(group) != option
    }
    wanted = make_converter().unstructure(composed.config)
    defaults, missing = _with_defaults(chosen, wanted, config_dir)
    values = {
        section: _differences(content, defaults.get(section), missing, f"{section}.")
        for section, content in wanted.items()
        if section not in (*_OF_THE_PLACE, "plan_only", "rerun", "repeat", "ignore_forecast")
    }
    overrides = [{f"override /{group}": option} for group, option in chosen.items()]
    content: dict[str, Any] = {"defaults": overrides}
    content |= {section: value for section, value in values.items() if value not in ({}, None)}
    lines = ["# @package _global_", f"# {program()} experiment={name} -- found by {MADE_BY}."]
    lines += [f"# {line}".rstrip() for line in evidence]
    return "\n".join(lines) + "\n" + yaml.safe_dump(content, sort_keys=False, width=1000)


def _with_defaults(
    chosen: Mapping[str, str], wanted: Mapping[str, Any], config_dir: Path | None
) -> tuple[dict[str, Any], set[str]]:
    """Return the configuration of the choices only, and its keys that have no default."""
    options = [f"{group}={option}" for group, option in chosen.items()]
    filled: dict[str, str] = {}
    while True:
        try:
            values = [f"{key}={value}" for key, value in filled.items()]
            config = compose([*options, *values], config_dir).config
            return make_converter().unstructure(config), set(filled)
        except ConfigError as error:
            keys = [problem.key for problem in error.problems if "." in problem.key]
            if not keys or keys[0] in filled:
                raise
            section, _, field = keys[0].partition(".")
            filled[keys[0]] = f"'{wanted[section][field]}'"


def _differences(wanted: Any, usual: Any, missing: set[str], path: str) -> Any:
    """Return the differences from the defaults as a tree, {} or None if there are none."""
    if not isinstance(wanted, dict):
        return None if wanted == usual else wanted
    before = usual if isinstance(usual, dict) else {}
    return {
        key: value
        for key, value in wanted.items()
        if key != "option" and (value != before.get(key) or f"{path}{key}" in missing)
    }
