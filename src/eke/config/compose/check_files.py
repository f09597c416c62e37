"""Check the files of a config folder, and explain errors that Hydra finds in them."""

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from omegaconf.errors import OmegaConfBaseException

from eke.common.errors import Fix, Problem
from eke.common.paths import conf_folder
from eke.common.plugins import load_plugin
from eke.common.text import list_closest
from eke.config.compose.catalogue import (
    LABELS,
    Catalogue,
    hydra_reason,
    is_valid_value,
    suggest_match,
    suggest_value,
)
from eke.config.compose.compose_cache import PRESETS
from eke.config.compose.hydra_settings import explain_in_file, is_hydras
from eke.config.compose.suggest import nearest_key
from eke.config.schema import VARIANTS, Config

_CORRECT_FILE = Fix(remark="correct this file")

_GLOBAL = ("experiment", "recipe")
"""Groups whose files may contain any key of the configuration."""

_PACKAGE = re.compile(r"#\s*@package\s+_global_\s*$")


def check_folder(folder: Path) -> list[Problem]:
    """Return the problems of a config folder: missing, unknown groups, files without effect."""
    if not folder.is_dir():
        why = "is not a folder" if folder.exists() else "no such folder"
        fix = Fix(remark="--config-dir FOLDER")
        return [Problem("--config-dir", str(folder), why, fix, "missing_folder")]
    groups = sorted(p.name for p in conf_folder().iterdir() if p.is_dir())
    # Deeper than options only in groups, and not in folders such as `runs`.
    deeper = [path for group in groups for path in folder.glob(f"{group}/*/**/*")]
    found = sorted([*folder.glob("*"), *folder.glob("*/*"), *deeper])
    problems = [_check_path(path, path.relative_to(folder), groups) for path in found]
    return [problem for problem in problems if problem]


def _check_path(path: Path, place: Path, groups: Sequence[str]) -> Problem | None:
    if path.is_dir() or any(part.startswith(".") for part in place.parts):
        return None
    if path.suffix == ".yml":
        fix = _move_fix(path.name, f"{path.stem}.yaml")
        return Problem(str(path), "", "Hydra only reads *.yaml files", fix, "wrong_file")
    if path.suffix != ".yaml" or place.parts[0] == "hydra":
        return None
    if len(place.parts) == 1:
        why = "has no effect. Options are in a folder with the name of their group"
        return Problem(str(path), "", why, _move_fix(place, f"experiment/{place}"), "wrong_file")
    if place.parts[0] not in groups:
        near = suggest_match(place.parts[0], groups) or "experiment"
        why = f"{place.parts[0]} is not a group. Groups: {', '.join(groups)}"
        return Problem(str(path), "", why, _move_fix(place.parts[0], near), "wrong_file")
    if (conf_folder() / place).exists():  # Hydra uses the first on its search path
        why, new = "eke's option of the same name takes precedence", f"my_{place.stem}"
        return Problem(str(path), "", why, _move_fix(place, place.with_stem(new)), "wrong_file")
    return None


def _move_fix(old: object, new: object) -> Fix:
    return Fix(remark=shlex.join(["mv", str(old), str(new)]))


def explain_file(error: BaseException, catalogue: Catalogue) -> Problem:
    """Return the problem of an error inside a file: name, line, reason and replacement."""
    cause: BaseException | None = error
    while cause:
        if isinstance(cause, yaml.MarkedYAMLError) and (mark := cause.problem_mark):
            where, why = f"{mark.name}:{mark.line + 1}", f"invalid YAML: {cause.problem}"
            return Problem(where, "", why, Fix(remark="correct this line"), "wrong_file")
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    if absent := re.search(r"Could not find '([\w/]+)/([\w.-]+)'", text):
        return _absent_option(absent[1], absent[2], catalogue)
    match = re.search(r"In '([^']+)'", text)
    file = _find_file(match[1] if match else "", catalogue)
    if file and (begun := _header_problem(file)):
        return begun
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    named = re.search(r"full_key: (\S+)", f"{error}\n{error.__cause__}")
    key = named[1] if named else str(getattr(cause, "full_key", "") or "")
    name = key.rpartition(".")[2]
    where = f"{file}:{_line_of(name, file)}" if file else "the composed configuration"
    return Problem(where, key, *_explain_key(key, error, catalogue), "wrong_file")


def explain_untyped(group: str, option: str, catalogue: Catalogue) -> Problem:
    """Return the problem of an option without schema in a group with several schemas."""
    file = _find_file(f"{group}/{option}", catalogue)
    begun = _header_problem(file) if file else None
    why = f"its defaults need /schema/{group}/NAME@_here_. NAME: {', '.join(VARIANTS[group])}"
    return begun or Problem(group, option, why, _CORRECT_FILE, "wrong_file")


def check_options(
    config: Config, choices: Mapping[str, str], catalogue: Catalogue
) -> list[Problem]:
    """Check `option:` in files: eke must implement an option with this name and these keys."""
    problems = []
    for group, files in catalogue.options.items():
        section = getattr(config, group, None)
        option = getattr(section, "option", None)
        known = [name for name, file in files.items() if file.is_relative_to(catalogue.folders[0])]
        named = option == choices.get(group) and (group in LABELS or option in known)
        if option is None or named or load_plugin(f"eke.{group}s", option):
            continue
        fits = [o for o in known if catalogue.schema_class(group, o) is type(section)]
        allowed = known if group in LABELS else fits
        if option not in allowed:
            chosen = [catalogue.options[g][choices[g]] for g in (group, *PRESETS)]
            setting = rf"\boption\s*:\s*[\"']?{re.escape(option)}\b"
            file = next((f for f in chosen if _find_line(setting, f)), chosen[0])
            why = f"is not an option of {group} with these keys. Options: {', '.join(fits)}"
            usual = choices[group] if group in LABELS else fits[0]
            fix = Fix(remark=f"write option: {suggest_match(option, fits) or usual}")
            where = f"{file}:{_line_of('option', file)}"
            problems.append(Problem(where, option, why, fix, "unknown_option"))
    return problems


def _header_problem(file: Path) -> Problem | None:
    """Return the problem of a file without package directive or defaults list, else None."""
    group, text = file.parent.name, file.read_text(errors="replace")
    header = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    why = fix = ""
    if group in _GLOBAL and not any(_PACKAGE.match(line) for line in header):
        why = f"files of {group} need the first line # @package _global_"
        fix = "write # @package _global_"
    elif group in VARIANTS and not re.search("^defaults:", text, re.MULTILINE):
        first, *others = VARIANTS[group]
        why = f"needs a schema in its defaults: {', '.join([first, *others])}"
        first = "custom" if re.search(r"^target\s*:", text, re.MULTILINE) else first
        fix = f"write defaults: [/schema/{group}/{first}@_here_, _self_]"
    return Problem(f"{file}:1", "", why, Fix(remark=fix), "wrong_file") if fix else None


def _absent_option(group: str, option: str, catalogue: Catalogue) -> Problem:
    folders = reversed(catalogue.folders)
    files = [file for folder in folders for file in sorted(folder.rglob("*.yaml"))]
    if is_hydras(group):
        return explain_in_file(group, files, option)
    options = catalogue.options.get(group, {})
    why = f"{option} is not an option of {group}. Options: {list_closest(option, options, group)}"
    near = suggest_match(option, options)
    fix = Fix(remark=f"write {group}: {near}") if near else _CORRECT_FILE
    entry = rf"{group}\s*:\s*{option}\b"
    where = next((f"{f}:{n}" for f in files if (n := _find_line(entry, f))), "")
    where = where or "the composed configuration"
    return Problem(where, "", why, fix, "unknown_option")


def _find_file(name: str, catalogue: Catalogue) -> Path | None:
    paths = (folder / f"{name}.yaml" for folder in reversed(catalogue.folders))
    return next((path for path in paths if name and path.exists()), None)


def _find_line(pattern: str, file: Path) -> int | None:
    lines = enumerate(file.read_text(errors="replace").splitlines(), start=1)
    return next((number for number, line in lines if re.search(pattern, line)), None)


def _line_of(name: str, file: Path) -> int:
    """Return the number of the line that sets `name`, 1 if not found."""
    return (name and _find_line(rf"^\s*[\"']?{re.escape(name)}[\"']?\s*:", file)) or 1


def _explain_key(key: str, error: BaseException, catalogue: Catalogue) -> tuple[str, Fix]:
    """Return the reason of an error, and the replacement for the file."""
    said, name = hydra_reason(error), key.rpartition(".")[2]
    if re.search("not in 'Custom", said):
        return said, Fix(remark=f"write args: {{{name}: ...}}")
    field = catalogue.keys.get(key)
    if field is None:
        near = nearest_key(key, catalogue) if key else None
        return said, Fix(remark=f"write {near}") if near else _CORRECT_FILE
    match = re.search(r"'([^']*)'", said)
    value = {"True": True, "False": False}.get(match[1], match[1]) if match else None
    if value is None or is_valid_value(field, value):
        return said, Fix(remark=f"write another {key}")
    meant = suggest_value(field, value)
    quoted = f'"{meant}"' if meant in ("on", "off") else meant
    fix = Fix(remark=f"write {name}: {quoted}")
    return f"must be {field.words()}. {said}", fix
