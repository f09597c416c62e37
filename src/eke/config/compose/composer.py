"""Compose configurations from overrides, or report all their errors."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eke.common.errors import ConfigError, Fix, Problem, is_placeholder
from eke.common.paths import conf_folder
from eke.config.compose.catalogue import (
    Catalogue,
    class_fields,
    default_text,
    hydra_reason,
    is_interpolation,
    is_valid_value,
    make_catalogue,
    shown,
)
from eke.config.compose.check_files import (
    check_folder,
    check_options,
    explain_file,
    explain_untyped,
)
from eke.config.compose.check_overrides import (
    find_problems,
    last_wins,
    parse,
    secrets_in,
    suggest_fix,
)
from eke.config.compose.check_sources import find_source_problems
from eke.config.compose.compose_cache import (
    PRESETS,
    ComposeCache,
    ComposedTree,
    RejectedValues,
    hydra_state,
    make_trees,
    set_by_preset,
)
from eke.config.compose.hydra_settings import explain_in_file, is_hydras, is_launching
from eke.config.compose.own_code import as_argument, is_own, redirected, typed_config
from eke.config.compose.suggest import (
    as_evaluation,
    option_for,
    suggest_option,
    suggest_value_for_key,
)
from eke.config.schema import ENTRIES, VARIANTS, Config, PretrainedModel, Sweep, resolve_attention


@dataclass(frozen=True)
class Composed:
    """Composed configuration with its overrides and options."""

    config: Config
    choices: dict[str, str]
    """Group -> option, including recipe, experiment and sweep, without Hydra's own groups."""
    overrides: tuple[str, ...]
    config_dir: Path | None = None
    """Folder with the user's options, in addition to eke's."""

    @cached_property
    def catalogue(self) -> Catalogue:
        """Options available for the composition."""
        return make_catalogue(self.config_dir)

    @cached_property
    def set_paths(self) -> frozenset[str]:
        """Groups and keys set by overrides, experiment, sweep or recipe."""
        presets = [(name, self.choices.get(name, "none")) for name in ("sweep", "recipe")]
        paths = {path for preset in presets for path in set_by_preset(*preset, self.catalogue)}
        return user_set_keys(self) | paths


def compose(
    overrides: Sequence[str], config_dir: Path | None = None, *, in_sweep: bool = False
) -> Composed:
    """Compose one configuration. ConfigError has all errors of overrides and files.

    `config_dir` is a folder with the user's options. `in_sweep` permits overrides that name a
    sweep, its launcher or its sweeper, which have no effect on a single run.
    """
    with _explained(overrides), hydra_state():
        trees = make_trees(open_catalogue(config_dir))
        overrides, _ = last_wins(overrides, trees.catalogue)
        return _composed(_valid_overrides(overrides, trees, in_sweep), tuple(overrides), trees)


@contextmanager
def _explained(overrides: Sequence[str]) -> Iterator[None]:
    """Convert any exception of Hydra, OmegaConf or YAML to a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        why, words = f"cannot be composed: {hydra_reason(error)}", shown(" ".join(overrides))
        raise ConfigError(Problem("command line", words, why, id="not_composable")) from error


def open_catalogue(config_dir: Path | None) -> Catalogue:
    """Return the catalogue with the user's options. ConfigError if the folder is invalid."""
    config_dir = config_dir.resolve() if config_dir else None
    if config_dir and (problems := check_folder(config_dir)):
        raise ConfigError(problems)
    return make_catalogue(config_dir)


def _valid_overrides(typed: Sequence[str], trees: ComposeCache, in_sweep: bool) -> list[str]:
    """Return the overrides to compose. ConfigError has the errors of all overrides."""
    catalogue = trees.catalogue
    spaced, joined = _spaced(list(typed), catalogue)
    texts = [t for t in dict.fromkeys(joined) if not (in_sweep and is_launching(t))]
    found = {text: problems_of(text, catalogue, in_sweep) for text in texts}
    good = [text for text in texts if not found[text]]
    problems = spaced + [problem for text in texts for problem in found[text]]
    if problems:
        problems = redirected(problems, texts, catalogue)
        problems = _with_full_commands(problems, found) + _further(good, problems, trees)
        raise ConfigError(_without_placeholders(problems, good))
    return good


def _spaced(typed: list[str], catalogue: Catalogue) -> tuple[list[Problem], list[str]]:
    """Return problems of `seed = 3`, which a shell splits, and the other words."""
    problems: list[Problem] = []
    rest: list[str] = []
    while typed:
        word = typed.pop(0)
        key, equals, value = word.partition("=")
        pieces = typed[:2] if typed[:1] == ["="] else typed[:1]
        behind = "".join(pieces)
        torn = (equals and not value) or (not equals and behind.startswith("="))
        if not torn or not behind.strip("=") or "=" in behind.lstrip("="):
            rest.append(word)
            continue
        text = word + behind
        del typed[: len(pieces)]
        why = "has spaces around the equals sign"
        key, _, value = text.partition("=")
        fix = suggest_fix(text, catalogue)
        problems.append(Problem(key, shown(f"= {value}"), why, fix, "spaces"))
    return problems, rest


def problems_of(text: str, catalogue: Catalogue, in_sweep: bool) -> list[Problem]:
    """Return the problems of one override, for a single run or a run of a sweep."""
    key, _, value = text.lstrip("+").partition("=")
    named = key == "sweep" and value != "none"
    problems = find_problems(text, catalogue)
    if in_sweep or not (named or (key.startswith("sweep.") and key in catalogue.keys)):
        return problems
    if named and problems:  # a misspelt name
        return problems
    why = "is a sweep and needs -m" if named else "is for sweeps and needs -m"
    return [Problem(key, shown(value), why, Fix("-m", text), "needs_sweep")]


def _without_placeholders(problems: list[Problem], good: Sequence[str]) -> list[Problem]:
    """Drop placeholders such as `data.path=FILE` from fixes if another override sets the key."""
    words = [*good, *(word for problem in problems for word in problem.fix.words)]
    given = {word.partition("=")[0] for word in words if not is_placeholder(word)}

    def shortened(fix: Fix) -> Fix:
        rest = [
            w for w in fix.words[1:] if not is_placeholder(w) or w.partition("=")[0] not in given
        ]
        return Fix(*fix.words[:1], *rest, remark=fix.remark)

    return [dataclasses.replace(problem, fix=shortened(problem.fix)) for problem in problems]


def _with_full_commands(problems: list[Problem], found: dict[str, list[Problem]]) -> list[Problem]:
    """Extend `-m` fixes to the entire command if all other overrides are valid."""
    if not all(problem.fix.is_sweep for problem in problems):
        return problems
    each = [found[text][-1].fix.words[1:] if found[text] else (text,) for text in found]
    command = Fix("-m", *(word for words in each for word in words))
    return [dataclasses.replace(problem, fix=command) for problem in problems]


def compose_tree(good: Sequence[str], trees: ComposeCache) -> ComposedTree:
    """Compose one tree without schema types inside `hydra_state`. Values may be missing."""
    try:
        return trees.tree(good)
    except RejectedValues as error:
        raise ConfigError(_explain(error, good, trees)) from error
    except ConfigError:
        raise
    except Exception as error:  # in a file
        raise ConfigError(explain_file(error, trees.catalogue)) from error


def _composed(good: Sequence[str], typed: tuple[str, ...], trees: ComposeCache) -> Composed:
    """Compose to schema classes, without sweep settings. ConfigError for invalid values."""
    tree, catalogue = compose_tree(good, trees), trees.catalogue
    problems = _unresolved(tree.config, good, catalogue)
    own = catalogue.own_folder
    if own and not HydraConfig.initialized():  # a job of Hydra has read its settings
        presets = [(group, tree.choices[group]) for group in PRESETS]
        files = [*(catalogue.options[group][o] for group, o in presets), *own.glob("*/*.yaml")]
        paths = [path for each in presets for path in set_by_preset(*each, catalogue)]
        hydras = dict.fromkeys(filter(is_hydras, paths))
        problems += [explain_in_file(path, files) for path in hydras]
    if problems:
        raise ConfigError(problems)
    try:
        found: Any = OmegaConf.to_object(tree.config)
    except OmegaConfBaseException as error:
        with suppress(OmegaConfBaseException):
            for key in sorted(OmegaConf.missing_keys(tree.config)):
                section = key.partition(".")[0]
                why = f"{section}={tree.config[section].option} needs a value"
                fix = Fix(suggest_value_for_key(key, catalogue) or key)
                problems.append(Problem(key, "", why, fix, "missing_value"))
        problems = problems or [explain_file(error, catalogue)]
        raise ConfigError(problems) from error
    untyped = [g for g, kinds in VARIANTS.items() if type(getattr(found, g)) not in kinds.values()]
    if untyped:
        raise ConfigError([explain_untyped(g, tree.choices[g], catalogue) for g in untyped])
    config, problems = typed_config(found)
    problems += check_options(config, tree.choices, catalogue) + find_source_problems(config.data)
    problems += _absent_mappings(config, tree.choices, good, catalogue)
    if problems := problems + secrets_in(dataclasses.asdict(config)):
        raise ConfigError(problems)
    config.sweep = Sweep()
    choices = dict(tree.choices)
    if not isinstance(config.model, PretrainedModel):  # checkpoints are read later
        config = resolve_attention(config)
        choices["attention"] = config.attention.option
    return Composed(config, choices, typed, own)


def _absent_mappings(
    config: Config, choices: dict[str, str], good: Sequence[str], catalogue: Catalogue
) -> Iterator[Problem]:
    """Yield problems of entries of mappings that the chosen options lack."""
    for text in good:
        key = text.lstrip("+").partition("=")[0]
        section, name = f"{key}.".split(".")[:2]  # force_add adds an entry to any section
        if section in ENTRIES or not catalogue.is_entry(key):
            continue
        if name not in dict(class_fields(type(getattr(config, section)))):
            typed = f"{section}.{name}=[...]" if name == "sources" else text
            yield _misplaced(typed, choices[section], good, catalogue)


def _unresolved(tree: DictConfig, texts: Sequence[str], catalogue: Catalogue) -> list[Problem]:
    """Return problems of interpolations (`seed=${train.steps}`) without target or valid type."""
    problems = []
    for text in texts:
        parsed = parse(text)
        key = parsed.key_or_group
        if key not in catalogue.keys or not is_interpolation(parsed.value()):
            continue
        field, why = catalogue.keys[key], ""
        try:
            found = OmegaConf.select(tree, key, throw_on_missing=True)
            # ${model}, an entire section, is an object of its schema class, not a mapping.
            is_section = str(parsed.value()).strip("${} ") in catalogue.sections
            plain = OmegaConf.is_config(found) and not is_section
            value = OmegaConf.to_container(found) if plain else found
            if value is not None and not is_valid_value(field, value):
                why = f"must be {field.words()}, not {shown(str(found))}"
        except OmegaConfBaseException as error:
            why = f"must be {field.words()}. {hydra_reason(error)}"
        if why:
            fix, raw = Fix(suggest_value_for_key(key, catalogue) or key), text.partition("=")[2]
            problems.append(Problem(key, shown(raw), why, fix, "interpolation"))
    return problems


def _explain(error: RejectedValues, good: Sequence[str], trees: ComposeCache) -> list[Problem]:
    """Return problems of values that are valid, but rejected by the options."""
    catalogue, problems = trees.catalogue, []
    for text, refused in error.errors.items():
        key, _, value = text.lstrip("+").partition("=")
        section, _, name = key.rpartition(".")
        option = error.choices.get(section, "")
        fields = dict(class_fields(catalogue.schema_class(section, option))) if option else {}
        if option and name not in fields:
            problems.append(_misplaced(text, option, good, catalogue))
        elif option and value == "null":
            fix = Fix(f"{key}={default_text(fields[name], key)}")
            why = f"must be {fields[name].words()}"
            problems.append(Problem(key, value, why, fix, "wrong_type"))
        else:
            problems.append(Problem(key, shown(value), hydra_reason(refused), id="wrong_type"))
    if all(problem.key in catalogue.keys for problem in problems):
        problems += _further(good, problems, trees)
    return problems


def _misplaced(text: str, option: str, good: Sequence[str], catalogue: Catalogue) -> Problem:
    """Return the problem of a key that exists only in other options of the group."""
    key, _, value = text.lstrip("+").partition("=")
    section, name = f"{key}.".split(".")[:2]
    if is_own(section, option, catalogue):
        return as_argument(text)
    others = catalogue.options_with(section, name)
    why, fix = f"{section}={option} has no {name}. Options with it: {', '.join(others)}", Fix()
    if any(other.startswith(f"{section}=") for other in good):
        why += ". Choose one of them, or remove the key"
    elif name == "eval_path":
        fix = Fix(*as_evaluation(value))
    else:
        wanted = suggest_option(section, option, others, catalogue)
        if "jsonl" in others:
            typed = (each.partition("=")[2] for each in good if each.startswith("data.path="))
            wanted = option_for(next(typed, ".jsonl")) or wanted
        fix = Fix(f"{section}={wanted}", text)
    return Problem(key, shown(value), why, fix, "other_options_key")


def _further(good: Sequence[str], problems: list[Problem], trees: ComposeCache) -> list[Problem]:
    """Return further problems of the valid overrides, except in sections with a problem."""
    words = [word.partition("=")[0] for problem in problems for word in problem.fix.words]
    wrong = {problem.key for problem in problems}
    blocked = {re.split(r"[./@]", key.lstrip("+~"))[0] for key in [*wrong, *words]}
    blocked &= set(trees.catalogue.options)
    if blocked.intersection(PRESETS):
        return []
    keys = {text: text.lstrip("+").partition("=")[0] for text in good}
    skipped = blocked | wrong
    rest = [t for t, key in keys.items() if not {key, key.partition(".")[0]} & skipped]
    try:
        _composed(rest, (), trees)
    except ConfigError as error:
        return error.problems
    return []


Progress = Callable[[int, int], None]
"""Callback with the number done and the total."""


def compose_cells(
    cells: Sequence[tuple[str, ...]], trees: ComposeCache, progress: Progress | None = None
) -> list[Composed]:
    """Compose each run of a sweep in order. ConfigError has shared errors once."""
    done: list[Composed] = []
    found: Counter[Problem] = Counter()
    with hydra_state():
        for number, cell in enumerate(cells, start=1):
            texts = [text for text in dict.fromkeys(cell) if not is_launching(text)]
            try:
                with _explained(cell):
                    done.append(_composed(texts, cell, trees))
            except ConfigError as error:
                found.update(error.problems)
            if progress:
                progress(number, len(cells))
    if found:
        raise ConfigError(problems_by_cell(found, len(cells)))
    return done


def problems_by_cell(found: Counter[Problem], total: int) -> list[Problem]:
    """Return each problem once, with its number of runs unless all have it."""
    return [
        p if n >= total else dataclasses.replace(p, why=f"{p.why} (in {n} of {total} runs)")
        for p, n in found.items()
    ]


def user_set_keys(composed: Composed) -> frozenset[str]:
    """Return the groups and keys set by overrides or by the experiment."""
    # Only rows of a named sweep, which precedes the recipe, are overrides.
    typed = {text.lstrip("+~").partition("=")[0] for text in composed.overrides}
    experiment = composed.choices.get("experiment", "none")
    return frozenset(typed | set(set_by_preset("experiment", experiment, composed.catalogue)))


def is_set(composed: Composed, key: str) -> bool:
    """Return whether the user set `group.key` by an override, preset or own option."""
    group = key.partition(".")[0]
    file = composed.catalogue.options.get(group, {}).get(composed.choices.get(group, ""))
    own = file is not None and not file.is_relative_to(conf_folder())
    return own or key in composed.set_paths


def compose_with(composed: Composed, choices: Sequence[str]) -> Composed:
    """Compose with choices instead of the recipe's. `user_set_keys` must not contain them."""
    typed = [text for text in composed.overrides if not text.startswith("recipe=")]
    return compose([*typed, "recipe=none", *choices], composed.config_dir, in_sweep=True)
