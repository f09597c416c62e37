"""Split the command line into overrides and flags; find secrets, and errors in user files."""

import itertools
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import OmegaConfBaseException

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.masking import masked
from eke.common.paths import conf_folder, program, user_path
from eke.common.plugins import load_plugin
from eke.common.text import format_value
from eke.config.compose.catalogue import (
    LABELS,
    SECRET_FIX,
    Catalogue,
    admits,
    class_fields,
    closest,
    default_text,
    hydra_reason,
    make_catalogue,
    probably_meant,
    shown,
)
from eke.config.compose.compose_cache import PRESETS
from eke.config.compose.hydra_settings import explain_in_file, is_hydras
from eke.config.compose.overrides import find_problems, last_wins, suggest_fix
from eke.config.compose.suggest import completed, nearest_key, option_for
from eke.config.foreign_names import find_retired
from eke.config.mixing import SHARED, source_names
from eke.config.schema import MIXED, VARIANTS, Config, Data, Mix, Weighted


def secrets_in(config: Mapping[str, object]) -> list[Problem]:
    """List a problem for each key, top-level or nested, whose text holds a secret."""
    found: dict[str, str] = {}
    masked(config, found=found)
    why = "holds a secret, which files that others read would hold, and trackers"
    fixes = {"tracker.uri": Fix("tracker.uri=null", remark="and: export MLFLOW_TRACKING_URI=...")}
    return [
        Problem(key, text, why, fixes.get(key, Fix(remark=SECRET_FIX)))
        for key, text in found.items()
    ]


# Hydra 1.3.8's own flags (hydra/_internal/utils.py, get_args_parser) -> number of values.
_HYDRA_FLAGS = {
    **dict.fromkeys(("--hydra-help", "--resolve", "--shell-completion", "-sc"), 0),
    **dict.fromkeys(("--cfg", "-c", "--package", "-p", "--config-path", "-cp"), 1),
    **dict.fromkeys(("--config-name", "-cn", "--experimental-rerun"), 1),
}
_INFO_FLAGS = ("--info", "-i")
LONG = {"-c": "--cfg", "-p": "--package", "-i": "--info"}
"""Short flag of Hydra -> the long one."""
FLAG_VALUES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
"""Flag of Hydra -> the values that it can have."""
_HELP = ("--help", "-h")
_RUN = ("--run", "-r")
"""Hydra's flags of a single run, which needs none."""
_SWITCHES = {
    "--multirun": "multirun", "-m": "multirun", "--version": "version", "--cell": "cell",
}  # fmt: skip
CONFIG_DIR = ("--config-dir", "-cd")
"""Flags of the user's folder of options."""
# An example value of a flag, for error messages about a missing one.
_EXAMPLES = {"--cfg": "job", "-c": "job", "--package": "optimizer", "-p": "optimizer"}
# Flags of `eke plan`, which removes them before this parser.
_OF_PLAN = ("--why", "--quick", "--json")
_BYTE = re.compile("[\udc80-\udcff]")
"""Characters by which Python replaces bytes that are not UTF-8 (PEP 383)."""
# Every flag -> number of values.
_FLAGS = {
    **_HYDRA_FLAGS,
    **dict.fromkeys(_INFO_FLAGS, 1),
    **dict.fromkeys((*_HELP, *_RUN, *_SWITCHES), 0),
    **dict.fromkeys(CONFIG_DIR, 1),
}


@dataclass(frozen=True)
class Arguments:
    """A parsed command line."""

    overrides: tuple[str, ...] = ()
    """`key=value`, in command-line order, each key once."""
    verbose: str = ""
    """Loggers of `hydra.verbose`, with commas; `root` is all."""
    warnings: tuple[str, ...] = ()
    """Overrides that a later one of the same key has replaced."""
    help: str | None = None
    """--help, -h: the group to describe, empty for the first page; None without the flag."""
    version: bool = False
    """--version."""
    multirun: bool = False
    """--multirun, -m: the overrides span a sweep."""
    cell: bool = False
    """--cell: the overrides are those of one run of the sweep that they name."""
    config_dir: Path | None = None
    """--config-dir, -cd: a folder with the user's own options."""
    hydra_flags: tuple[str, ...] = ()
    """Hydra's flags with their values, unchanged."""


@dataclass
class _Reader:
    """The remaining tokens, and the problems so far."""

    tokens: list[str]
    problems: list[Problem] = field(default_factory=list)

    def value(self, flag: str, inline: str | None) -> str:
        """The value of a flag: the text after `=`, else the next token."""
        if inline is not None:
            return inline
        if self.tokens and not self.tokens[0].startswith("-"):
            return self.tokens.pop(0)
        example = Fix(remark=f"{flag} {_EXAMPLES.get(flag, 'FOLDER')}")
        self.problems.append(Problem(flag, "", f"{flag} needs a value", example))
        return ""


def split_arguments(argv: Sequence[str], also: Mapping[str, int] | None = None) -> Arguments:
    """Split a command line; `also` are the command's own flags with their numbers of values."""
    if unreadable := [_no_utf8(token) for token in argv if _BYTE.search(token)]:
        raise ConfigError(unreadable)
    typed = [dict([token.lstrip("+").partition("=")[::2]]) for token in argv]
    if secret := [problem for each in typed for problem in secrets_in(each)]:
        raise ConfigError(secret)
    words = [token.lstrip("-+") for token in argv]
    if any(word.startswith("cfg={") for word in words):
        # https://github.com/wandb/wandb/issues/9143
        valid = [word for word in words if not find_problems(word, make_catalogue())]
        why = "is a logged configuration, with which W&B's agent restarts a run; type its overrides"
        command = Fix(remark=shlex.join([*program().split(), *valid]))
        raise ConfigError(Problem("cfg", "{...}", why, command))
    found, reader = Arguments(), _Reader(list(argv))
    while reader.tokens:
        token = reader.tokens.pop(0)
        if token.startswith("-") and token not in ("-", "--"):
            found = _read_flag(token, found, reader, also or {})
        elif token != "--":
            found = replace(found, overrides=(*found.overrides, token))
    if reader.problems:
        raise ConfigError(reader.problems)
    kept, warnings = last_wins(found.overrides, make_catalogue())
    verbose = [text for text in kept if text.lstrip("+").startswith("hydra.verbose=")]
    rest, loggers = tuple(text for text in kept if text not in verbose), map(_loggers, verbose)
    return replace(found, overrides=rest, verbose=",".join(loggers), warnings=tuple(warnings))


def _loggers(text: str) -> str:
    """Names of the loggers of `hydra.verbose=...`, as Hydra reads it (hydra/core/utils.py)."""
    raw = text.partition("=")[2]
    if not re.fullmatch(r"\[[\w., ]*\]|[A-Za-z_][\w.]*", raw):
        why = "true, false, a logger or a list of loggers is wanted"
        raise ConfigError(Problem("hydra.verbose", raw, why, Fix("hydra.verbose=true")))
    names = raw.strip("[]").replace(" ", "")
    return {"true": "root", "false": ""}.get(names.lower(), names)


def _no_utf8(token: str) -> Problem:
    """Problem for a token that is not UTF-8, since plans, records and trackers hold text."""
    typed = _BYTE.sub(lambda sign: f"\\x{os.fsencode(sign[0]).hex()}", token)
    why = "is no UTF-8 text, which eke's files hold; rename a file of this name"
    return Problem("a word", typed, why, Fix(_BYTE.sub("_", token)))


def _read_flag(token: str, found: Arguments, reader: _Reader, also: Mapping[str, int]) -> Arguments:
    """What is found with this flag, whose values are taken from the reader."""
    flag, equals, rest = token.partition("=")
    inline = rest if equals else None
    if flag in _SWITCHES and inline is None:
        switched: dict[str, Any] = {_SWITCHES[flag]: True}
        return replace(found, **switched)
    if flag in _RUN and inline is None:
        return found
    if flag in _HELP:
        named = reader.tokens and re.fullmatch(r"\w[\w.]*", reader.tokens[0])
        return replace(found, help=inline or (reader.tokens.pop(0) if named else ""))
    if flag in CONFIG_DIR:
        return replace(found, config_dir=user_path(reader.value(flag, inline)))
    if flag in _HYDRA_FLAGS:
        values = [reader.value(flag, inline) for _ in range(_HYDRA_FLAGS[flag])]
        return replace(found, hydra_flags=(*found.hydra_flags, flag, *values))
    if flag in _INFO_FLAGS:
        # A word that is neither a flag nor an override is a (misspelt) topic of --info.
        follows = reader.tokens and not re.match(r"-|~|[^=]*=", reader.tokens[0])
        values = [inline] if inline else [reader.tokens.pop(0)] if follows else []
        return replace(found, hydra_flags=(*found.hydra_flags, flag, *values))
    reader.problems.append(_unknown_flag(flag, inline, found, reader, also))
    return found


def _unknown_flag(
    flag: str, inline: str | None, found: Arguments, reader: _Reader, also: Mapping[str, int]
) -> Problem:
    """Explain `--precision bf16`, `--lr=0.1`, `--fp16` with the override as the fix."""
    value, catalogue = inline, make_catalogue()
    takes_next = reader.tokens and "=" not in reader.tokens[0]
    if value is None and takes_next and not reader.tokens[0].startswith("--"):
        value = reader.tokens.pop(0)
    name, of_command = flag.lstrip("-"), _near_flag(flag, also)
    long_flag = of_command or _near_flag(flag, _FLAGS)
    override = f"{name.replace('-', '_')}={'true' if value is None else value}"
    is_a_setting = find_retired(name) or completed(name, catalogue)
    if long_flag and (of_command or not is_a_setting):
        follows = f" {value}" if value and {**_FLAGS, **also}[long_flag] else ""
        why = "takes no value" if flag == long_flag else "there is no such flag"
        return Problem(flag, value or "", why, Fix(remark=f"{long_flag}{follows}"))
    if flag in _OF_PLAN:
        rest = [t for t in (*found.overrides, *reader.tokens) if t != "plan_only=true"]
        command = shlex.join(["eke", "plan", flag, *rest])
        return Problem(flag, "", "is a flag of eke plan", Fix(remark=command))
    fix = suggest_fix(override, catalogue)
    why = "there is no such flag; settings are written as key=value, without dashes"
    if not fix:
        flags = ", ".join([*also, "-m", "--config-dir FOLDER", "--cfg job", "--help", "--version"])
        why = f"there is no such flag or setting; flags are {flags}"
    return Problem(flag, value or "", why, fix)


def _near_flag(flag: str, known: Mapping[str, int]) -> str | None:
    return closest(flag, [each for each in known if each.startswith("--")])


_FLAG = "--config-dir"
CORRECT_FILE = Fix(remark="correct this file")

GLOBAL = ("experiment", "recipe")
"""Groups whose files contain keys of the whole configuration."""

_PACKAGE = re.compile(r"#\s*@package\s+_global_\s*$")


def check_folder(folder: Path) -> list[Problem]:
    """Check a config folder for existence, unknown groups, and files without effect."""
    if not folder.is_dir():
        kind = "is a file, not a folder" if folder.exists() else "there is no such folder"
        return [Problem(_FLAG, str(folder), kind, Fix(remark=f"{_FLAG} FOLDER"))]
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
        fix = _move(path.name, f"{path.stem}.yaml")
        return Problem(str(path), "", "Hydra reads *.yaml only", fix)
    if path.suffix != ".yaml" or place.parts[0] == "hydra":
        return None
    if len(place.parts) == 1:
        why = "has no effect: options lie in a folder named by their group"
        return Problem(str(path), "", why, _move(place, f"experiment/{place}"))
    if place.parts[0] not in groups:
        near = closest(place.parts[0], groups) or "experiment"
        why = f"{place.parts[0]} is not a group: {', '.join(groups)}"
        return Problem(str(path), "", why, _move(place.parts[0], near))
    if (conf_folder() / place).exists():  # Hydra uses the first on its search path
        why = "has no effect: eke has an option of this name, and that one is taken"
        return Problem(str(path), "", why, _move(place, place.with_stem(f"my_{place.stem}")))
    return None


def _move(old: object, new: object) -> Fix:
    return Fix(remark=shlex.join(["mv", str(old), str(new)]))


def explain_file(error: BaseException, catalogue: Catalogue) -> Problem:
    """Explain an error inside a file: name, line, reason and replacement."""
    cause: BaseException | None = error
    while cause:
        if isinstance(cause, yaml.MarkedYAMLError) and (mark := cause.problem_mark):
            fix = Fix(remark="correct this line")
            return Problem(f"{mark.name}:{mark.line + 1}", "", f"not YAML: {cause.problem}", fix)
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    if absent := re.search(r"Could not find '([\w/]+)/([\w.-]+)'", text):
        return _absent_option(absent[1], absent[2], catalogue)
    match = re.search(r"In '([^']+)'", text)
    file = _find_file(match[1] if match else "", catalogue)
    if file and (begun := _beginning(file)):
        return begun
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    named = re.search(r"full_key: (\S+)", f"{error}\n{error.__cause__}")
    key = named[1] if named else str(getattr(cause, "full_key", "") or "")
    name = key.rpartition(".")[2]
    where = f"{file}:{_line_of(name, file)}" if file else "the composed configuration"
    return Problem(where, key, *_explain_key(key, error, catalogue))


def explain_untyped(group: str, option: str, catalogue: Catalogue) -> Problem:
    """Explain an option without a schema in a group whose options have different keys."""
    file = _find_file(f"{group}/{option}", catalogue)
    begun = _beginning(file) if file else None
    why = f"names no /schema/{group}/NAME@_here_ in its defaults: {', '.join(VARIANTS[group])}"
    return begun or Problem(group, option, why, CORRECT_FILE)


def check_options(
    config: Config, choices: Mapping[str, str], catalogue: Catalogue
) -> list[Problem]:
    """Check `option:` in files: eke must implement it, with the same keys."""
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
            why = f"is no option of {group} with these keys: {', '.join(fits)}"
            usual = choices[group] if group in LABELS else fits[0]
            fix = Fix(remark=f"write option: {closest(option, fits) or usual}")
            problems.append(Problem(f"{file}:{_line_of('option', file)}", option, why, fix))
    return problems


def _beginning(file: Path) -> Problem | None:
    """Problem of a missing package directive or defaults list in a file; None if complete."""
    group, text = file.parent.name, file.read_text(errors="replace")
    header = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    why = fix = ""
    if group in GLOBAL and not any(_PACKAGE.match(line) for line in header):
        why = f"{group}s are about all groups, which the first line has to say to Hydra"
        fix = "write # @package _global_"
    elif group in VARIANTS and not re.search("^defaults:", text, re.MULTILINE):
        first, *others = VARIANTS[group]
        why = f"does not say which keys it has: those of one of {', '.join([first, *others])}"
        fix = f"write defaults: [/schema/{group}/{first}@_here_, _self_]"
    return Problem(f"{file}:1", "", why, Fix(remark=fix)) if fix else None


def _absent_option(group: str, option: str, catalogue: Catalogue) -> Problem:
    """Explain a defaults list entry that does not exist."""
    folders = reversed(catalogue.folders)
    files = [file for folder in folders for file in sorted(folder.rglob("*.yaml"))]
    if is_hydras(group):
        return explain_in_file(group, files, option)
    options = catalogue.options.get(group, {})
    why = f"{option} is not an option of {group}: {', '.join(options)}"
    near = closest(option, options)
    fix = Fix(remark=f"write {group}: {near}") if near else CORRECT_FILE
    entry = rf"{group}\s*:\s*{option}\b"
    where = next((f"{f}:{n}" for f in files if (n := _find_line(entry, f))), "")
    return Problem(where or "the composed configuration", "", why, fix)


def _find_file(name: str, catalogue: Catalogue) -> Path | None:
    paths = (folder / f"{name}.yaml" for folder in reversed(catalogue.folders))
    return next((path for path in paths if name and path.exists()), None)


def _find_line(pattern: str, file: Path) -> int | None:
    lines = enumerate(file.read_text(errors="replace").splitlines(), start=1)
    return next((number for number, line in lines if re.search(pattern, line)), None)


def _line_of(name: str, file: Path) -> int:
    """Line number that sets `name`; 1 if not found."""
    return (name and _find_line(rf"^\s*[\"']?{re.escape(name)}[\"']?\s*:", file)) or 1


def _explain_key(key: str, error: BaseException, catalogue: Catalogue) -> tuple[str, Fix]:
    """Reason of the error, and the replacement for the file."""
    said = hydra_reason(error)
    field = catalogue.keys.get(key)
    if field is None:
        near = nearest_key(key, catalogue) if key else None
        return said, Fix(remark=f"write {near}") if near else CORRECT_FILE
    match = re.search(r"'([^']*)'", said)
    value = {"True": True, "False": False}.get(match[1], match[1]) if match else None
    if value is None or admits(field, value):
        return said, Fix(remark=f"write another {key}")
    meant = probably_meant(field, value)
    quoted = f'"{meant}"' if meant in ("on", "off") else meant
    fix = Fix(remark=f"write {key.rpartition('.')[2]}: {quoted}")
    return f"{field.words()} is wanted; {said}", fix


def find_source_problems(data: Data) -> list[Problem]:
    """Everything that is wrong in the sources of a mix; nothing is wrong in other data."""
    if not isinstance(data, Mix):
        return []
    if not data.sources:
        fix = Fix(remark="data.sources=[{option:jsonl,path:FILE_OR_FOLDER,weight:1},...]")
        return [Problem("data.sources", "[]", "a mix has at least one source", fix)]
    found = [problem for each in enumerate(data.sources) for problem in _check_source(*each)]
    return found or list(_check_shares(data))


def _of_source(number: int, key: str, value: Any, why: str, fix: Fix | str) -> Problem:
    """Problem of a key of a source; a text as `fix` is the right value."""
    fix = Fix(f"data.sources.{number}.{key}={fix}") if isinstance(fix, str) else fix
    return Problem(f"data.sources[{number}].{key}", shown(format_value(value)), why, fix)


def _check_source(number: int, source: dict[str, Any]) -> Iterator[Problem]:
    option = source.get("option")
    if option not in MIXED:
        ending = option_for(str(source.get("path", "")))
        meant = closest(str(option), MIXED) or (ending if ending in MIXED else "jsonl")
        why = f"is to be one of {', '.join(MIXED)}"
        yield _of_source(number, "option", option, why, str(meant))
        return
    fields = {**dict(class_fields(Weighted)), **dict(class_fields(MIXED[option]))}
    for key, known in fields.items():
        if known.default == "???" and key not in source:
            wanted = default_text(known, f"data.{key}")
            yield _of_source(number, key, "", f"{option} needs a value for it", wanted)
    for key, value in source.items():
        if key in SHARED:
            fix = Fix(remark=f"data.{key}={format_value(value)}, and not in the source")
            yield _of_source(number, key, value, "all sources share it", fix)
            continue
        if key not in fields:
            fix = Fix(remark=f"write {closest(key, fields) or ', '.join({*fields} - SHARED)}")
            yield _of_source(number, key, value, f"{option} has no such key", fix)
            continue
        known = fields[key]
        is_text = isinstance(value, str) and known.kind in (bool, int, float)
        if is_text or not admits(known, value):
            why = f"{known.words()} is wanted"
            yield _of_source(number, key, value, why, probably_meant(known, value))
        elif known.limit and value is not None and not known.limit.admits(value):
            why = f"must be {known.limit.describe(value)}"
            yield _of_source(number, key, value, why, format_value(known.default or 1))


def _check_shares(mix: Mix) -> Iterator[Problem]:
    """Weights of some sources alone, and names that two have."""
    weights, names = [source.get("weight") for source in mix.sources], source_names(mix)
    given = [weight for weight in weights if weight is not None]
    for number, (weight, name) in enumerate(zip(weights, names, strict=True)):
        if weight is None and (given or mix.is_stream):
            why = f"{len(given)} of {len(weights)} sources have a weight: all have one, or none"
            if mix.is_stream:
                why = "the rows of a stream are not counted: each source has one"
            yield _of_source(number, "weight", None, why, format_value(min(given, default=1)))
        if name in names[:number]:
            why = f"is the name of data.sources[{names.index(name)}] too; losses are known by it"
            of_hub = "name" in dict(class_fields(MIXED[mix.sources[number]["option"]]))
            fix = Fix(remark="each split once") if of_hub else f"{name}_{number}"
            yield _of_source(number, "name", name, why, fix)
