"""What a sweep varies: typed behind -m, and said by the file of `sweep=NAME`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from omegaconf import OmegaConf

from eke.common.errors import ConfigError, Problem
from eke.common.units import format_number
from eke.config.compose.batch_compose import Many
from eke.config.compose.catalogue import Catalogue
from eke.config.compose.formatting import as_typed, shown
from eke.config.compose.hydra_settings import is_hydras
from eke.config.compose.lists import sweep_parts, sweep_values
from eke.config.compose.overrides import find_problems, parse
from eke.config.schema import Sweep
from eke.config.schema.sweep import Seeds
from eke.config.sweep.text import split_list, sweep_text, value_text

MAX_CELLS = 100_000
"""More is a mistake in a range: at 10 ms a cell, planning them takes a quarter of an hour."""

Overrides = tuple[str, ...]


@dataclass(frozen=True)
class Definition:
    """Overrides by the part they play; `sweep.*` itself is taken out of them."""

    axes: tuple[Overrides, ...]
    """Of each key that was typed, and of each in `product`, all values; often one."""
    rows: dict[str, Overrides] = field(default_factory=dict)
    """Name -> overrides."""
    steps: tuple[Overrides, ...] = ()
    """Of the keys in `zip`, the values that belong together."""
    settings: Sweep = field(default_factory=Sweep)

    def repeat(self, number: int) -> Overrides:
        """What the cells of one repeat have in common."""
        repeat = (f"repeat={number}",) if self.settings.repeats > 1 else ()
        has_seed = self.settings.seeds is Seeds.per_repeat
        return (*repeat, f"seed={number}") if has_seed else repeat


def read_definition(typed: Sequence[str], many: Many) -> Definition:
    """The typed overrides and the named sweep's. A key that is typed replaces the file's own.

    Raises:
        ConfigError: everything that is wrong with what was typed, or with the file.
    """
    catalogue = many.catalogue
    about = [text for text in typed if _key(text).startswith("sweep.")]
    own = [text for text in typed if text not in about]
    problems = [p for text in own for p in _wrong(text, catalogue)]
    settings, more = _settings(own, about, many)
    problems += more
    if problems:
        raise ConfigError(problems)
    keys = {_key(text) for text in own}
    axes = [_values(text, catalogue) for text in own]
    free = {key: value for key, value in settings.product.items() if key not in keys}
    axes += [_values(sweep_text(str(key), value), catalogue) for key, value in free.items()]
    zipped = {str(key): value for key, value in settings.zip.items() if key not in keys}
    rows = {str(name): _row(str(name), value, keys) for name, value in settings.rows.items()}
    definition = Definition(tuple(axes), rows, _steps(zipped, catalogue), settings)
    _refuse_twice(definition, keys)
    return definition


# --- settings -----------------------------------------------------------------------------------


def _settings(own: Sequence[str], about: Sequence[str], many: Many) -> tuple[Sweep, list[Problem]]:
    """`sweep.*` of the file, with what was typed put above it."""
    named = [text for text in own if _key(text) == "sweep"]
    texts: list[str] = []
    problems, whole = _torn_by_braces(about, many.catalogue)
    for text in whole:
        key, _, raw = text.lstrip("+").partition("=")
        text = f"sweep.exclude={split_list(raw)}" if key == "sweep.exclude" else text
        found = find_problems(text, many.catalogue)
        problems += found
        texts += [] if found else [text]
    if any(find_problems(text, many.catalogue) for text in named):
        return Sweep(), problems  # an unknown name; said elsewhere
    if not named and not texts:
        return Sweep(), problems
    tree = many.tree([*named, *texts])
    settings: Any = OmegaConf.to_object(tree.config.sweep)
    raw_parts: Any = OmegaConf.to_container(tree.config.sweep, resolve=False)
    settings.product, settings.rows, settings.zip = (
        raw_parts[part] for part in ("product", "rows", "zip")
    )
    if settings.repeats < 1:
        why = "every configuration runs at least once"
        problems.append(Problem("sweep.repeats", str(settings.repeats), why, "sweep.repeats=1"))
    return settings, problems


# --- values -------------------------------------------------------------------------------------


def _torn_by_braces(about: Sequence[str], catalogue: Catalogue) -> tuple[list[Problem], list[str]]:
    """`sweep.zip={seed:[1,2]}`, of which bash makes a word for each comma; returns the others."""
    pieces: dict[str, list[str]] = {}
    for text in about:
        pieces.setdefault(_key(text), []).append(text.partition("=")[2])
    problems, torn = [], set()
    for key, values in pieces.items():
        joined = f"{key}={{{','.join(values)}}}"
        broken = len(values) > 1 and any(find_problems(f"{key}={v}", catalogue) for v in values)
        if broken and not find_problems(joined, catalogue):
            why = "a shell takes braces apart at each comma; quotes keep them together"
            problems.append(Problem(key, " ".join(values), why, as_typed(joined)))
            torn.add(key)
    return problems, [text for text in about if _key(text) not in torn]


def _key(text: str) -> str:
    return text.lstrip("+").partition("=")[0]


def _wrong(text: str, catalogue: Catalogue) -> list[Problem]:
    """What is wrong with an override that may have many values."""
    problems = find_problems(text, catalogue)
    try:
        parsed = parse(text)
    except Exception:  # what kind, `problems` says
        return problems
    if not parsed.is_sweep_override() or is_hydras(parsed.key_or_group):
        return problems
    if any(isinstance(part, IntervalSweep) for part in sweep_parts(parsed.value())):
        why = "an interval has no values to list; it is for sweepers that sample"
        return [Problem(parsed.key_or_group, text.partition("=")[2], why, "hydra/sweeper=optuna")]
    if parsed.key_or_group == "sweep":
        why = "one named sweep at a time"
        first = text.partition("=")[2].partition(",")[0]
        return [Problem("sweep", text.partition("=")[2], why, f"sweep={first}")]
    # The last one says that several values need -m, and here is -m.
    return problems[:-1] or _no_match(parsed, catalogue)


def _no_match(parsed: Override, catalogue: Catalogue) -> list[Problem]:
    group = parsed.key_or_group
    options = list(catalogue.options.get(group, {}))
    globs = [part for part in sweep_parts(parsed.value()) if isinstance(part, Glob)]
    if all(glob.filter(options) for glob in globs):
        return []
    known = ", ".join(options) or "it is no group"
    raw = str(parsed.input_line).partition("=")[2]
    return [Problem(group, raw, f"matches no option of {group}: {known}")]


def _values(text: str, catalogue: Catalogue) -> Overrides:
    """Every `key=value` an override stands for.

    Raises:
        ConfigError: they are wrong.
    """
    problems = _wrong(text, catalogue)
    if problems:
        raise ConfigError(problems)
    parsed = parse(text)
    if not parsed.is_sweep_override():
        return (text,)
    values = islice(sweep_values(parsed, catalogue), MAX_CELLS + 1)
    return tuple(f"{parsed.get_key_element()}={item}" for item in values)


def _row(name: str, value: Any, keys: set[str]) -> Overrides:
    """The overrides of a row, without those of the keys that were typed.

    Raises:
        ConfigError: the row is no mapping.
    """
    if not isinstance(value, dict | None):
        why = "a row is a mapping of keys to values, {} for none"
        raise ConfigError(Problem(f"sweep.rows.{name}", shown(str(value)), why))
    found = {str(key): text for key, text in (value or {}).items()}
    return tuple(f"{key}={value_text(text)}" for key, text in found.items() if key not in keys)


def _steps(zipped: dict[str, Any], catalogue: Catalogue) -> tuple[Overrides, ...]:
    """The values of each key side by side.

    Raises:
        ConfigError: the lists are of different lengths.
    """
    columns = [_values(sweep_text(key, value), catalogue) for key, value in zipped.items()]
    for key, column in zip(zipped, columns, strict=True):
        if len(column) != len(columns[0]):
            other = f"{next(iter(zipped))} has {len(columns[0])}"
            why = f"{key} has {format_number(len(column), 'value')} and {other}; zip pairs them"
            # With every combination lists of any lengths go together.
            pairs = [f"{k}:[{','.join(_bare(c))}]" for k, c in zip(zipped, columns, strict=True)]
            fix = as_typed(f"sweep.product={{{','.join(pairs)}}}")
            raise ConfigError(Problem("sweep.zip", key, why, f"{fix}   (in place of sweep.zip)"))
    return tuple(zip(*columns, strict=True))


def _bare(column: Overrides) -> list[str]:
    """The values of a column without their key."""
    return [text.partition("=")[2] for text in column]


def _refuse_twice(definition: Definition, typed: set[str]) -> None:
    """A key has its values from one place.

    Raises:
        ConfigError: two parts of the sweep set it.
    """
    parts = {
        "product": {_key(axis[0]) for axis in definition.axes if axis} - typed,
        "zip": {_key(text) for step in definition.steps for text in step},
        "rows": {_key(text) for row in definition.rows.values() for text in row},
    }
    if definition.settings.repeats > 1:
        parts["repeats"] = {"repeat"}
        parts["product"] |= {"repeat"} & typed
    if definition.settings.seeds is Seeds.per_repeat:
        parts["seeds"] = {"seed"}
        parts["product"] |= {"seed"} & typed
    problems = []
    names = list(parts)
    for number, name in enumerate(names):
        for other in names[number + 1 :]:
            problems += [
                Problem(f"sweep.{other}", key, f"sweep.{name} sets {key}, too; leave one out")
                for key in sorted(parts[name] & parts[other])
            ]
    if problems:
        raise ConfigError(problems)
