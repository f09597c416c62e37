"""The user's own options (`--config-dir`): what is wrong with the folder, and with a file in it."""

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from omegaconf.errors import OmegaConfBaseException

from eke.common.errors import Problem
from eke.common.paths import conf_folder
from eke.config.compose.catalogue import Catalogue
from eke.config.compose.formatting import closest, first_line
from eke.config.compose.hydra_settings import explain_in_files, is_hydras
from eke.config.compose.independent_options import PRESETS
from eke.config.compose.suggest import nearest_key
from eke.config.compose.values import admits, probably_meant
from eke.config.schema import VARIANTS, Config

_FLAG = "--config-dir"

LABELS = ("model", "precision", "memory", "dataloader", "slurm")
"""Groups in which `option` only names a set of values: a user's file may have its own name."""

GLOBAL = ("experiment", "recipe")
"""Groups whose files have the keys of the whole configuration."""

_PACKAGE = re.compile(r"#\s*@package\s+_global_\s*$")


def check_folder(folder: Path) -> list[Problem]:
    """A folder that is none, groups that do not exist, files that would have no effect.

    Source of the last: Hydra's search path takes the first file of a name, and eke's own is first.
    """
    if not folder.is_dir():
        kind = "is a file, not a folder" if folder.exists() else "there is no such folder"
        return [Problem(_FLAG, str(folder), kind, f"{_FLAG} FOLDER")]
    groups = [p.name for p in conf_folder().iterdir() if p.is_dir()]
    found = sorted([*folder.glob("*"), *folder.glob("*/*"), *_in_groups(folder, groups)])
    return [problem for path in found for problem in _check_path(path, folder, groups)]


def _in_groups(folder: Path, groups: Sequence[str]) -> Iterator[Path]:
    """What lies deeper than an option does: of a folder that is no group, `runs` say, nothing."""
    for group in groups:
        yield from folder.glob(f"{group}/*/**/*")


def _check_path(path: Path, folder: Path, groups: Sequence[str]) -> list[Problem]:
    shipped = conf_folder()
    place = path.relative_to(folder)
    if path.is_dir() or any(part.startswith(".") for part in place.parts):
        return []
    if path.suffix == ".yml":
        return [
            Problem(str(path), "", "Hydra reads *.yaml only", _move(path.name, f"{path.stem}.yaml"))
        ]
    if path.suffix != ".yaml" or place.parts[0] == "hydra":
        return []
    if len(place.parts) == 1:
        why = "has no effect: options lie in a folder named by their group"
        return [Problem(str(path), "", why, _move(place, f"experiment/{place}"))]
    if place.parts[0] not in groups:
        near = closest(place.parts[0], groups) or "experiment"
        why = f"{place.parts[0]} is not a group: {', '.join(sorted(groups))}"
        return [Problem(str(path), "", why, _move(place.parts[0], near))]
    if (shipped / place).exists():
        why = "has no effect: eke has an option of this name, and that one is taken"
        return [Problem(str(path), "", why, _move(place, place.with_stem(f"my_{place.stem}")))]
    return []


def _move(old: object, new: object) -> str:
    return shlex.join(["mv", str(old), str(new)])


def explain_file(error: BaseException, folders: tuple[Path, ...], catalogue: Catalogue) -> Problem:
    """A mistake inside a file: its name, its line, what is wrong, what to write instead."""
    marked = _find_marked(error)
    if marked and marked.problem_mark:
        mark = marked.problem_mark
        why = f"not YAML: {marked.problem}"
        return Problem(f"{mark.name}:{mark.line + 1}", "", why, "mend this line")
    text = str(error)
    key = _full_key(error)
    match = re.search(r"In '([^']+)'", text)
    name = key.rpartition(".")[2]
    absent = re.search(r"Could not find '([\w/]+)/([\w.-]+)'", text)
    if absent:
        return _absent_option(absent[1], absent[2], folders, catalogue)
    file = _find_file(match[1] if match else "", folders)
    if file and (begun := _beginning(file)):
        return begun
    where = f"{file}:{_line_of(name, file)}" if file else "the composed configuration"
    return Problem(where, key, *_explain_key(key, error, catalogue))


def explain_untyped(group: str, option: str, folders: tuple[Path, ...]) -> Problem:
    """An option of a group whose options differ in their keys, which chose none of them."""
    file = _find_file(f"{group}/{option}", folders)
    begun = _beginning(file) if file else None
    why = f"names no /schema/{group}/NAME@_here_ in its defaults: {', '.join(VARIANTS[group])}"
    return begun or Problem(group, option, why, "mend this file")


def check_options(
    config: Config, choices: Mapping[str, str], catalogue: Catalogue
) -> list[Problem]:
    """`option:` in files: it names what is built, so eke must have it, with the same keys."""
    problems = []
    for group, files in catalogue.options.items():
        section = getattr(config, group, None)
        option = getattr(section, "option", None)
        known = [name for name, file in files.items() if file.is_relative_to(catalogue.folders[0])]
        named = option == choices.get(group) and (group in LABELS or option in known)
        if option is None or named:
            continue
        fits = [o for o in known if catalogue.schema_class(group, o) is type(section)]
        if option not in (known if group in LABELS else fits):
            chosen = [catalogue.options[g][choices[g]] for g in (group, *PRESETS)]
            setting = re.compile(rf"\boption\s*:\s*[\"']?{re.escape(option)}\b")
            file = next((f for f in chosen if setting.search(f.read_text())), chosen[0])
            why = f"is no option of {group} with these keys: {', '.join(fits)}"
            usual = choices[group] if group in LABELS else fits[0]
            fix = f"write option: {closest(option, fits) or usual}"
            problems.append(Problem(f"{file}:{_line_of('option', file)}", option, why, fix))
    return problems


def _beginning(file: Path) -> Problem | None:
    """What the first lines of a file lack for any of its keys to have a place; None for nothing."""
    group, text = file.parent.name, file.read_text(errors="replace")
    header = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    if group in GLOBAL and not any(_PACKAGE.match(line) for line in header):
        why = f"{group}s are about all groups, and Hydra is told so in the first line"
        return Problem(f"{file}:1", "", why, "write # @package _global_")
    if group in VARIANTS and not re.search("^defaults:", text, re.MULTILINE):
        names = ", ".join(VARIANTS[group])
        why = f"does not say which keys it has; they are those of one of {names}"
        fix = f"write defaults: [/schema/{group}/{next(iter(VARIANTS[group]))}@_here_, _self_]"
        return Problem(f"{file}:1", "", why, fix)
    return None


def _absent_option(
    group: str, option: str, folders: tuple[Path, ...], catalogue: Catalogue
) -> Problem:
    """A defaults list names an option that does not exist."""
    if is_hydras(group):
        files = [file for folder in reversed(folders) for file in folder.glob("*/*.yaml")]
        return explain_in_files([group], files, option)[0]
    options = catalogue.options.get(group, {})
    why = f"{option} is not an option of {group}: {', '.join(options)}"
    near = closest(option, options)
    fix = f"write {group}: {near}" if near else "mend this file"
    for folder in reversed(folders):
        for file in sorted(folder.rglob("*.yaml")):
            for number, line in enumerate(file.read_text(errors="replace").splitlines(), start=1):
                if re.search(rf"{group}\s*:\s*{option}\b", line):
                    return Problem(f"{file}:{number}", "", why, fix)
    return Problem("the composed configuration", "", why, fix)


def _find_marked(error: BaseException | None) -> yaml.MarkedYAMLError | None:
    while error is not None:
        if isinstance(error, yaml.MarkedYAMLError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _full_key(error: BaseException) -> str:
    match = re.search(r"full_key: (\S+)", f"{error}\n{error.__cause__}")
    if match:
        return match[1]
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    return str(getattr(cause, "full_key", "") or "")


def _find_file(name: str, folders: tuple[Path, ...]) -> Path | None:
    candidates = [folder / f"{name}.yaml" for folder in reversed(folders)] if name else []
    return next((path for path in candidates if path.exists()), None)


def _line_of(name: str, file: Path) -> int:
    """The line that sets `name`, 1 when it is not found."""
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), start=1):
        if name and re.match(rf"\s*[\"']?{re.escape(name)}[\"']?\s*:", line):
            return number
    return 1


def _explain_key(key: str, error: BaseException, catalogue: Catalogue) -> tuple[str, str]:
    """Why, and what to write into the file."""
    said = first_line(error)
    field = catalogue.keys.get(key)
    if field is None:
        near = nearest_key(key, catalogue) if key else None
        return said, f"write {near}" if near else "mend this file"
    match = re.search(r"'([^']*)'", said)
    value = {"True": True, "False": False}.get(match[1], match[1]) if match else None
    if value is None or admits(field, value):
        return said, f"write another {key}"
    meant = probably_meant(field, value)
    quoted = f'"{meant}"' if meant in ("on", "off") else meant
    return f"{field.words()} is wanted; {said}", f"write {key.rpartition('.')[2]}: {quoted}"
