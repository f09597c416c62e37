"""Expand a sweep, defined by overrides after -m and the file of `sweep=NAME`, to its runs."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep
from omegaconf import OmegaConf

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.text import format_number, format_value, quoted
from eke.config.compose.catalogue import Catalogue, shown
from eke.config.compose.check_overrides import find_problems, last_wins, parse
from eke.config.compose.compose_cache import ComposeCache, hydra_state
from eke.config.compose.composer import (
    Composed,
    Progress,
    compose_cells,
    compose_tree,
    open_catalogue,
    problems_by_cell,
    problems_of,
)
from eke.config.compose.hydra_settings import is_hydras, is_launching, sweep_parts, sweep_values
from eke.config.compose.own_code import redirected
from eke.config.schema import Sweep
from eke.config.schema.fields import find_limit_problems
from eke.config.schema.resources import Seeds
from eke.config.sweep.exclusion import CLAUSE_KEY, Expression, read_clauses, value_of


def value_text(value: Any) -> str:
    """Format a value for an override `key=VALUE`, quoted if Hydra requires it."""
    return format_value(value, _quoted_if_needed)


def _quoted_if_needed(text: str) -> str:
    with suppress(Exception):  # Hydra's and ANTLR's exceptions
        if parse(f"key={text}").value() == text:
            return text
    return quoted(text)


def _sweep_text(key: str, values: Any) -> str:
    """Format `key=a,b` from a list of values or a sweep's text."""
    if not isinstance(values, list):
        return f"{key}={values if isinstance(values, str) else value_text(values)}"
    return f"{key}={','.join(value_text(value) for value in values)}"


def _split_list(raw: str) -> str:
    """Quote each item of `[a=b and c=d, e in (f, g)]`, or a single text, as Hydra requires."""
    text = raw.strip()
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    # A comma in parentheses or quotes belongs to an item.
    items = re.findall(r"""(?:\([^)]*\)|"[^"]*"|'[^']*'|[^,])+""", inside)
    bare = [re.sub(r"""^(['"])([^'"]*)\1$""", r"\2", each.strip()) for each in items]
    return f"[{','.join(quoted(each) for each in bare if each)}]"


_MAX_CELLS = 100_000
"""Maximum number of runs. A plan takes 10 ms per run, about a quarter of an hour in total."""

_Overrides = tuple[str, ...]


@dataclass(frozen=True)
class _Definition:
    """Overrides of a sweep by role, without `sweep.*`."""

    axes: tuple[_Overrides, ...]
    """Values, often one, of each key in the overrides and in `product`."""
    rows: dict[str, _Overrides] = field(default_factory=dict)
    """Row's name -> overrides."""
    steps: tuple[_Overrides, ...] = ()
    """Values of the keys in `zip`, one tuple per step."""
    settings: Sweep = field(default_factory=Sweep)

    def repeat(self, number: int) -> _Overrides:
        """Return the overrides shared by all runs of one repeat."""
        repeat = (f"repeat={number}",) if self.settings.rounds > 1 else ()
        has_seed = self.settings.seeds is Seeds.per_repeat
        return (*repeat, f"seed={number}") if has_seed else repeat


def _read_definition(typed: Sequence[str], trees: ComposeCache) -> _Definition:
    """Combine overrides and the named sweep, whose keys they replace. ConfigError: all errors."""
    catalogue = trees.catalogue
    about = [text for text in typed if _key(text).startswith("sweep.")]
    own = [text for text in typed if text not in about]
    problems = redirected(
        [p for text in own for p in _override_problems(text, catalogue)], own, catalogue
    )
    settings, more = _settings(own, about, trees)
    problems += more
    if problems:
        raise ConfigError(problems)
    keys = {_key(text) for text in own}
    axes = [_values(text, catalogue) for text in own]
    free = {key: value for key, value in settings.product.items() if key not in keys}
    axes += [_values(_sweep_text(str(key), value), catalogue) for key, value in free.items()]
    zipped = {str(key): value for key, value in settings.zip.items() if key not in keys}
    rows = {str(name): _row(str(name), value, keys) for name, value in settings.rows.items()}
    definition = _Definition(tuple(axes), rows, _steps(zipped, catalogue), settings)
    _reject_duplicate_keys(definition)
    return definition


def _settings(
    own: Sequence[str], about: Sequence[str], trees: ComposeCache
) -> tuple[Sweep, list[Problem]]:
    """Return `sweep.*` of the file, updated by the overrides, and the problems."""
    named = [text for text in own if _key(text) == "sweep"]
    texts: list[str] = []
    problems: list[Problem] = []
    for text in about:
        key, _, raw = text.lstrip("+").partition("=")
        text = f"sweep.exclude={_split_list(raw)}" if key == "sweep.exclude" else text
        found = find_problems(text, trees.catalogue)
        problems += found
        texts += [] if found else [text]
    is_unknown = any(find_problems(text, trees.catalogue) for text in named)  # reported elsewhere
    if is_unknown or not (named or texts):
        return Sweep(), problems
    with hydra_state():
        tree = compose_tree([*named, *texts], trees)
    settings: Any = OmegaConf.to_object(tree.config.sweep)
    raw_parts: Any = OmegaConf.to_container(tree.config.sweep, resolve=False)
    for part in ("product", "rows", "zip"):
        setattr(settings, part, raw_parts[part])
    if not settings.is_auto and not re.fullmatch(r"0*[1-9]\d{0,8}", settings.repeats):
        why, fix = "must be a whole number from 1, or auto", Fix("sweep.repeats=auto")
        problems.append(Problem("sweep.repeats", shown(settings.repeats), why, fix, "wrong_type"))
    return settings, [*problems, *find_limit_problems(settings, "sweep.")]


def _key(text: str) -> str:
    return text.lstrip("+").partition("=")[0]


def _override_problems(text: str, catalogue: Catalogue) -> list[Problem]:
    """Return the problems of an override that may have several values."""
    if problems := find_problems(text, catalogue, multirun=True):
        return problems
    parsed = parse(text)
    key, raw = parsed.key_or_group, text.partition("=")[2]
    if not parsed.is_sweep_override() or is_hydras(key):
        return []
    if any(isinstance(part, IntervalSweep) for part in sweep_parts(parsed.value())):
        why = "has no list of values. Only sweepers that sample accept an interval"
        return [Problem(key, raw, why, Fix("hydra/sweeper=optuna"), "interval")]
    if key == "sweep":
        fix = Fix(f"sweep={raw.partition(',')[0]}")
        return [Problem("sweep", raw, "names several sweeps", fix, "several_values")]
    return []


def _values(text: str, catalogue: Catalogue) -> _Overrides:
    """Return each `key=value` of an override. ConfigError if it is invalid."""
    if problems := _override_problems(text, catalogue):
        raise ConfigError(problems)
    parsed = parse(text)
    if not parsed.is_sweep_override():
        return (text,)
    values = islice(sweep_values(parsed, catalogue), _MAX_CELLS + 1)
    return tuple(f"{parsed.get_key_element()}={item}" for item in values)


def _row(name: str, value: Any, keys: set[str]) -> _Overrides:
    """Return the overrides of a row, without keys set on the command line."""
    if not isinstance(value, dict | None):
        where, why = f"sweep.rows.{name}", "must be a mapping of keys to values, {} if empty"
        raise ConfigError(Problem(where, shown(str(value)), why, id="wrong_row"))
    found = (value or {}).items()
    return tuple(f"{key}={value_text(text)}" for key, text in found if str(key) not in keys)


def _steps(zipped: dict[str, Any], catalogue: Catalogue) -> tuple[_Overrides, ...]:
    """Combine the values of zipped keys step by step. ConfigError for unequal lengths."""
    columns = [_values(_sweep_text(key, value), catalogue) for key, value in zipped.items()]
    for key, column in zip(zipped, columns, strict=True):
        if len(column) != len(columns[0]):
            other = f"{next(iter(zipped))} has {len(columns[0])}"
            why = f"needs equal lengths: {key} has {format_number(len(column), 'value')}, {other}"
            raise ConfigError(Problem("sweep.zip", key, why, id="unequal_lengths"))
    return tuple(zip(*columns, strict=True))


def _reject_duplicate_keys(definition: _Definition) -> None:
    """Raise ConfigError for keys that a run has twice, in its row or in several parts."""
    # The first value of an axis, step or repeat represents all: only their keys matter here.
    product = [axis[0] for axis in definition.axes if axis]
    shared = [*product, *next(iter(definition.steps), ()), *definition.repeat(0)]
    found: dict[str, str] = {}
    for name, row in definition.rows.items() or [("", ())]:
        # Skip mappings, which Hydra merges.
        keys = Counter(_key(t) for t in (*shared, *row) if not t.partition("=")[2].startswith("{"))
        twice = [key for key, count in keys.items() if count > 1]
        found |= {key: f"sweep.rows.{name}" if name else "sweep" for key in twice}
    if found:
        why = "is set twice by the sweep"
        raise ConfigError([Problem(at, key, why, id="set_twice") for key, at in found.items()])


@dataclass(frozen=True)
class SweepCell:
    """One run of a sweep."""

    composed: Composed
    row: str = ""
    """Name of the run's row, empty if the sweep has no rows."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides without `sweep.*`."""
        return self.composed.overrides

    @property
    def name(self) -> str:
        """Name of the row, if any, and the overrides."""
        return f"{self.row}: {' '.join(self.overrides)}".removeprefix(": ")


@dataclass(frozen=True)
class Expanded:
    """Sweep with its runs in order, excluded runs and warnings."""

    cells: tuple[SweepCell, ...]
    excluded: Mapping[str, int] = field(default_factory=dict)
    """Clause of `sweep.exclude` -> number of excluded runs."""
    settings: Sweep = field(default_factory=Sweep)
    warnings: tuple[str, ...] = ()

    def first_round(self) -> "Expanded":
        """Return the sweep without later rounds of `sweep.repeats=auto`, which may be needless."""
        if not self.settings.is_auto:
            return self
        return replace(self, cells=tuple(c for c in self.cells if not c.composed.config.repeat))


def expand(
    overrides: Sequence[str], config_dir: Path | None = None, progress: Progress | None = None
) -> Expanded:
    """Expand a sweep to its runs, each composed once. ConfigError has all errors.

    The order is rounds, rows, zip, then the product in command-line order. The last key varies
    fastest. Equal runs are kept. Run identities detect them.
    """
    trees = ComposeCache(open_catalogue(config_dir))
    overrides, _ = last_wins(overrides, trees.catalogue)
    definition = _read_definition([t for t in overrides if not is_launching(t)], trees)
    settings = definition.settings
    clauses, problems = read_clauses(settings.exclude, trees.catalogue, list(definition.rows))
    if problems:
        raise ConfigError(problems)
    points = _points(definition)
    texts = [overrides for overrides, _ in points]
    _check_texts(texts, trees)
    composed = compose_cells(texts, trees, progress)
    cells = [SweepCell(c, row) for c, (_, row) in zip(composed, points, strict=True)]
    kept, excluded = _exclude(cells, clauses)
    warnings = [
        f"{CLAUSE_KEY}: {clause} excludes no run" for clause, n in excluded.items() if not n
    ]
    warnings += [
        f"sweep.{name} has no effect without sweep.repeats=auto"
        for name in ("max_repeats", "resolve", "budget")
        if not settings.is_auto and getattr(settings, name) != getattr(Sweep(), name)
    ]
    return Expanded(tuple(kept), excluded, settings, tuple(warnings))


def _points(definition: _Definition) -> list[tuple[_Overrides, str]]:
    """Return overrides and row of each run. ConfigError for none or too many."""
    rows = list(definition.rows.items()) or [("", ())]
    steps = definition.steps or ((),)
    repeats = definition.settings.rounds
    number = math.prod(map(len, definition.axes)) * len(rows) * len(steps) * repeats
    if number > _MAX_CELLS:
        longest = max(definition.axes, key=len, default=("sweep.repeats",))
        key = longest[0].partition("=")[0]
        why = f"the sweep has {number} runs. The maximum is {_MAX_CELLS}"
        raise ConfigError(Problem(key, f"{len(longest)} values", why, id="too_many_runs"))
    if not number:
        why = "the sweep has no runs: a range of its keys is empty"
        raise ConfigError(Problem(why, "", "", id="empty_sweep"))
    product = list(itertools.product(*definition.axes))
    cells = [
        ((*fixed, *row, *step), name) for name, row in rows for step in steps for fixed in product
    ]
    # Reverse every second round: on a machine that slows down steadily, later runs would seem
    # slower (simulated by tests/unit/results/report/test_power.py).
    return [
        ((*texts, *definition.repeat(k)), name)
        for k in range(repeats)
        for texts, name in (reversed(cells) if k % 2 else cells)
    ]


def _check_texts(cells: Sequence[tuple[str, ...]], trees: ComposeCache) -> None:
    """Raise ConfigError for invalid overrides, with each problem once for all its runs."""
    uses = Counter(text for cell in cells for text in set(cell))
    found: Counter[Problem] = Counter()
    for text, number in uses.items():
        if not is_launching(text):
            for problem in problems_of(text, trees.catalogue, in_sweep=True):
                found[problem] += number
    if found:
        raise ConfigError(problems_by_cell(found, len(cells)))


def _exclude(
    cells: Sequence[SweepCell], clauses: Mapping[str, Expression]
) -> tuple[list[SweepCell], dict[str, int]]:
    """Return the remaining runs, and the number excluded by each clause (the first that holds)."""
    counts = dict.fromkeys(clauses, 0)
    kept = []
    for cell in cells:
        lookup = partial(value_of, cell.composed, cell.row)
        if taken := next((text for text, each in clauses.items() if each.holds(lookup)), None):
            counts[taken] += 1
        else:
            kept.append(cell)
    if not kept:
        used = [text for text, number in counts.items() if number]
        why = f"{'together these exclude' if used[1:] else 'excludes'} all {len(cells)} runs"
        fix = Fix(remark="change a condition, or add values to the sweep")
        raise ConfigError(Problem(CLAUSE_KEY, ", ".join(used), why, fix, "empty_sweep"))
    return kept, counts
