"""From the command line of `-m` to composed cells."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eke.common.errors import ConfigError, Problem
from eke.config.compose.batch_compose import Many, Progress, counted
from eke.config.compose.composer import Composed, contradictions, problems_of
from eke.config.compose.hydra_settings import is_launching
from eke.config.sweep.definition import MAX_CELLS, Definition, read_definition
from eke.config.sweep.exclusion import KEY, Clause, read_clauses


@dataclass(frozen=True)
class SweepCell:
    """One run of a sweep."""

    composed: Composed
    row: str = ""
    """Name of its row; empty where there are none."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """As typed, `sweep.*` left out."""
        return self.composed.overrides

    @property
    def name(self) -> str:
        """The row and the overrides that are not the row's own name."""
        text = " ".join(self.overrides)
        return f"{self.row}: {text}" if self.row else text


@dataclass(frozen=True)
class Excluded:
    """What a clause of `sweep.exclude` left out."""

    clause: str
    count: int


@dataclass(frozen=True)
class Expanded:
    """A sweep: its cells in the order they are to run, and what was said about it."""

    cells: tuple[SweepCell, ...]
    excluded: tuple[Excluded, ...] = ()
    strict: bool = False
    warnings: tuple[str, ...] = ()


def expand(
    overrides: Sequence[str], config_dir: Path | None = None, progress: Progress | None = None
) -> Expanded:
    """The cells of a sweep, each composed once.

    Rounds go outermost, then rows, then zip, then the product in the order typed, the last key
    fastest. Every other round is the other way round: on a machine that slows down steadily, what
    always comes later would look slower (tests/unit/results/report/test_power.py simulates it).
    Cells that are equal stay: whether two runs are the same, their identity says.

    Args:
        overrides: as typed behind -m.
        config_dir: a folder with the user's own options, beside eke's.
        progress: told after each cell that is composed.

    Raises:
        ConfigError: everything that is wrong with any cell; what several have in common, once.
    """
    many = Many(config_dir)
    definition = read_definition([t for t in overrides if not is_launching(t)], many)
    settings = definition.settings
    clauses, problems = read_clauses(settings.exclude, many.catalogue, list(definition.rows))
    if problems:
        raise ConfigError(problems)
    points = _points(definition)
    texts = [point.overrides for point in points]
    _check_texts(texts, many)
    composed = many.compose(texts, progress)
    cells = [SweepCell(c, p.row) for c, p in zip(composed, points, strict=True)]
    kept, excluded = _exclude(cells, clauses)
    warnings = tuple(f"{KEY}: {e.clause} excludes nothing" for e in excluded if not e.count)
    return Expanded(tuple(kept), excluded, settings.strict, warnings)


@dataclass(frozen=True)
class _Point:
    """A cell before it is composed."""

    overrides: tuple[str, ...]
    row: str


def _points(definition: Definition) -> list[_Point]:
    """Every cell, in order.

    Raises:
        ConfigError: there are none, or more than anybody can mean.
    """
    rows = list(definition.rows.items()) or [("", ())]
    steps = definition.steps or ((),)
    repeats = definition.settings.repeats
    number = math.prod(map(len, definition.axes)) * len(rows) * len(steps) * repeats
    if number > MAX_CELLS:
        longest = max(definition.axes, key=len, default=("sweep.repeats",))
        key = longest[0].partition("=")[0]
        why = f"the sweep has {number} cells; {MAX_CELLS} are the most that are planned"
        raise ConfigError(Problem(key, f"{len(longest)} values", why))
    if not number:
        raise ConfigError("the sweep has no cells: a range of its keys is empty")
    product = list(itertools.product(*definition.axes))
    cells = [
        ((*fixed, *row, *step), name) for name, row in rows for step in steps for fixed in product
    ]
    return [
        _Point((*texts, *definition.repeat(k)), name)
        for k in range(repeats)
        for texts, name in (reversed(cells) if k % 2 else cells)
    ]


def _check_texts(cells: Sequence[tuple[str, ...]], many: Many) -> None:
    """What is wrong with single overrides, each told once whatever the number of its cells.

    Raises:
        ConfigError: there are such.
    """
    uses = Counter(text for cell in cells for text in set(cell))
    found: Counter[Problem] = Counter()
    for text, number in uses.items():
        if not is_launching(text):
            for problem in problems_of(text, many.catalogue, in_sweep=True):
                found[problem] += number
    for cell in cells if not found else []:
        found.update(contradictions(cell))
    if found:
        raise ConfigError(counted(found, len(cells)))


def _exclude(
    cells: Sequence[SweepCell], clauses: Sequence[Clause]
) -> tuple[list[SweepCell], tuple[Excluded, ...]]:
    """The cells that stay, and how many each clause takes; the first that is true takes one.

    Raises:
        ConfigError: none stays.
    """
    counts = dict.fromkeys((clause.text for clause in clauses), 0)
    kept = []
    for cell in cells:
        taken = next((c for c in clauses if c.excludes(cell.composed, cell.row)), None)
        if taken is None:
            kept.append(cell)
        else:
            counts[taken.text] += 1
    if not kept:
        why = (
            f"all {len(cells)} cells are excluded" if len(cells) > 1 else "it excludes the one cell"
        )
        raise ConfigError(Problem(KEY, " ".join(counts), why))
    return kept, tuple(Excluded(text, number) for text, number in counts.items())
