"""Split the command line into overrides and flags. Find secrets and errors in user files."""

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
    class_fields,
    default_text,
    hydra_reason,
    is_valid_value,
    make_catalogue,
    shown,
    suggest_match,
    suggest_value,
)
from eke.config.compose.check_overrides import find_problems, last_wins, suggest_fix
from eke.config.compose.compose_cache import PRESETS
from eke.config.compose.hydra_settings import explain_in_file, is_hydras
from eke.config.compose.suggest import nearest_key, option_for, suggest_value_for_key
from eke.config.foreign_names import find_retired
from eke.config.mixing import SHARED, source_names
from eke.config.schema import MIXED, VARIANTS, Config, Data, Mix, Weighted


def secrets_in(config: Mapping[str, object]) -> list[Problem]:
    """Return a problem for each key, top-level or nested, whose value holds a secret."""
    found: dict[str, str] = {}
    masked(config, found=found)
    why = "holds a secret that records and trackers would store"
    fixes = {"tracker.uri": Fix("tracker.uri=null", remark="and: export MLFLOW_TRACKING_URI=...")}
    return [
        Problem(key, text, why, fixes.get(key, Fix(remark=SECRET_FIX)), "secret")
        for key, text in found.items()
    ]


# Flags of Hydra 1.3.8 (hydra/_internal/utils.py, get_args_parser) -> number of values.
_HYDRA_FLAGS = {
    **dict.fromkeys(("--hydra-help", "--resolve", "--shell-completion", "-sc"), 0),
    **dict.fromkeys(("--cfg", "-c", "--package", "-p", "--config-path", "-cp"), 1),
    **dict.fromkeys(("--config-name", "-cn", "--experimental-rerun"), 1),
}
_INFO_FLAGS = ("--info", "-i")
LONG = {"-c": "--cfg", "-p": "--package", "-i": "--info"}
"""Short flag of Hydra -> long flag."""
FLAG_VALUES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
"""Flag of Hydra -> allowed values."""
_HELP = ("--help", "-h")
_RUN = ("--run", "-r")
"""Flags of Hydra for a single run, the default."""
_SWITCHES = {
    "--multirun": "multirun", "-m": "multirun", "--version": "version", "--cell": "cell",
}  # fmt: skip
CONFIG_DIR = ("--config-dir", "-cd")
"""Flags for the folder with the user's options."""
# Example values of flags for error messages.
_EXAMPLES = {"--cfg": "job", "-c": "job", "--package": "optimizer", "-p": "optimizer"}
# Flags of `eke plan`, which removes them before calling this parser.
_OF_PLAN = ("--why", "--quick", "--json")
_BYTE = re.compile("[\udc80-\udcff]")
"""Characters with which Python replaces bytes that are not UTF-8 (PEP 383)."""
# Every flag -> number of values.
_FLAGS = {
    **_HYDRA_FLAGS,
    **dict.fromkeys(_INFO_FLAGS, 1),
    **dict.fromkeys((*_HELP, *_RUN, *_SWITCHES), 0),
    **dict.fromkeys(CONFIG_DIR, 1),
}


@dataclass(frozen=True)
class Arguments:
    """Parsed command line."""

    overrides: tuple[str, ...] = ()
    """`key=value` in command-line order, each key once."""
    verbose: str = ""
    """Comma-separated loggers of `hydra.verbose`. `root` is all."""
    warnings: tuple[str, ...] = ()
    """Warnings about overrides that a later override of the same key replaces."""
    help: str | None = None
    """Group of --help or -h, empty for the first page. None: without the flag."""
    version: bool = False
    """True if --version is given."""
    multirun: bool = False
    """True if --multirun or -m is given: the overrides span a sweep."""
    cell: bool = False
    """True if --cell is given: the overrides are one run of the sweep they name."""
    config_dir: Path | None = None
    """Folder with the user's options (--config-dir, -cd)."""
    hydra_flags: tuple[str, ...] = ()
    """Hydra's flags and their values, unchanged."""


@dataclass
class _Reader:
    """Remaining words of the command line, and the problems so far."""

    tokens: list[str]
    problems: list[Problem] = field(default_factory=list)

    def value(self, flag: str, inline: str | None) -> str:
        """Return the value of a flag: the text after `=`, else the next word."""
        if inline is not None:
            return inline
        if self.tokens and not self.tokens[0].startswith("-"):
            return self.tokens.pop(0)
        example = Fix(remark=f"{flag} {_EXAMPLES.get(flag, 'FOLDER')}")
        self.problems.append(Problem(flag, "", f"{flag} needs a value", example, "missing_value"))
        return ""


def split_arguments(argv: Sequence[str], also: Mapping[str, int] | None = None) -> Arguments:
    """Split a command line. `also` maps the command's own flags to their number of values."""
    if unreadable := [_no_utf8(token) for token in argv if _BYTE.search(token)]:
        raise ConfigError(unreadable)
    typed = [dict([token.lstrip("+").partition("=")[::2]]) for token in argv]
    if secret := [problem for each in typed for problem in secrets_in(each)]:
        raise ConfigError(secret)
    words = [token.lstrip("-+") for token in argv]
    if any(word.startswith("cfg={") for word in words):
        # https://github.com/wandb/wandb/issues/9143
        valid = [word for word in words if not find_problems(word, make_catalogue())]
        why = "is a logged configuration (W&B agents restart a run with it). Use its overrides"
        command = Fix(remark=shlex.join([*program().split(), *valid]))
        raise ConfigError(Problem("cfg", "{...}", why, command, "logged_configuration"))
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
    """Return the loggers of `hydra.verbose=...`, parsed as in hydra/core/utils.py."""
    raw = text.partition("=")[2]
    if not re.fullmatch(r"\[[\w., ]*\]|[A-Za-z_][\w.]*", raw):
        why, fix = "must be true, false, a logger or a list of loggers", Fix("hydra.verbose=true")
        raise ConfigError(Problem("hydra.verbose", raw, why, fix, "wrong_type"))
    names = raw.strip("[]").replace(" ", "")
    return {"true": "root", "false": ""}.get(names.lower(), names)


def _no_utf8(token: str) -> Problem:
    """Return the problem of a word that is not UTF-8. Plans, records and trackers store text."""
    typed = _BYTE.sub(lambda sign: f"\\x{os.fsencode(sign[0]).hex()}", token)
    return Problem("a word", typed, "is not UTF-8", Fix(_BYTE.sub("_", token)), "not_utf8")


def _read_flag(token: str, found: Arguments, reader: _Reader, also: Mapping[str, int]) -> Arguments:
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
    """Return the problem of `--precision bf16`, `--lr=0.1` or `--fp16`, with the override."""
    value, catalogue = inline, make_catalogue()
    takes_next = reader.tokens and "=" not in reader.tokens[0]
    if value is None and takes_next and not reader.tokens[0].startswith("--"):
        value = reader.tokens.pop(0)
    name, of_command = flag.lstrip("-"), _near_flag(flag, also)
    long_flag = of_command or _near_flag(flag, _FLAGS)
    override = f"{name.replace('-', '_')}={'true' if value is None else value}"
    is_a_setting = find_retired(name) or suggest_value_for_key(name, catalogue)
    if long_flag and (of_command or not is_a_setting):
        follows = f" {value}" if value and {**_FLAGS, **also}[long_flag] else ""
        why = "takes no value" if flag == long_flag else "unknown flag"
        return Problem(flag, value or "", why, Fix(remark=f"{long_flag}{follows}"), "unknown_flag")
    if flag in _OF_PLAN:
        rest = [t for t in (*found.overrides, *reader.tokens) if t != "plan_only=true"]
        command = shlex.join(["eke", "plan", flag, *rest])
        return Problem(flag, "", "is a flag of eke plan", Fix(remark=command), "unknown_flag")
    fix = suggest_fix(override, catalogue)
    why = "unknown flag. Settings are key=value without dashes"
    if not fix:
        flags = ", ".join([*also, "-m", "--config-dir FOLDER", "--cfg job", "--help", "--version"])
        why = f"unknown flag or setting. Flags: {flags}"
    return Problem(flag, value or "", why, fix, "unknown_flag")


def _near_flag(flag: str, known: Mapping[str, int]) -> str | None:
    return suggest_match(flag, [each for each in known if each.startswith("--")])


_FLAG = "--config-dir"
_CORRECT_FILE = Fix(remark="correct this file")

_GLOBAL = ("experiment", "recipe")
"""Groups whose files may contain any key of the configuration."""

_PACKAGE = re.compile(r"#\s*@package\s+_global_\s*$")


def check_folder(folder: Path) -> list[Problem]:
    """Return the problems of a config folder: missing, unknown groups, files without effect."""
    if not folder.is_dir():
        kind = "is not a folder" if folder.exists() else "no such folder"
        return [Problem(_FLAG, str(folder), kind, Fix(remark=f"{_FLAG} FOLDER"), "missing_folder")]
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
        return Problem(str(path), "", "Hydra only reads *.yaml files", fix, "wrong_file")
    if path.suffix != ".yaml" or place.parts[0] == "hydra":
        return None
    if len(place.parts) == 1:
        why = "has no effect. Options are in a folder with the name of their group"
        return Problem(str(path), "", why, _move(place, f"experiment/{place}"), "wrong_file")
    if place.parts[0] not in groups:
        near = suggest_match(place.parts[0], groups) or "experiment"
        why = f"{place.parts[0]} is not a group. Groups: {', '.join(groups)}"
        return Problem(str(path), "", why, _move(place.parts[0], near), "wrong_file")
    if (conf_folder() / place).exists():  # Hydra uses the first on its search path
        why, new = "eke's option of the same name takes precedence", f"my_{place.stem}"
        return Problem(str(path), "", why, _move(place, place.with_stem(new)), "wrong_file")
    return None


def _move(old: object, new: object) -> Fix:
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
    if file and (begun := _beginning(file)):
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
    begun = _beginning(file) if file else None
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


def _beginning(file: Path) -> Problem | None:
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
        fix = f"write defaults: [/schema/{group}/{first}@_here_, _self_]"
    return Problem(f"{file}:1", "", why, Fix(remark=fix), "wrong_file") if fix else None


def _absent_option(group: str, option: str, catalogue: Catalogue) -> Problem:
    """Return the problem of a missing entry of a defaults list."""
    folders = reversed(catalogue.folders)
    files = [file for folder in folders for file in sorted(folder.rglob("*.yaml"))]
    if is_hydras(group):
        return explain_in_file(group, files, option)
    options = catalogue.options.get(group, {})
    why = f"{option} is not an option of {group}. Options: {', '.join(options)}"
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
    said = hydra_reason(error)
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
    fix = Fix(remark=f"write {key.rpartition('.')[2]}: {quoted}")
    return f"must be {field.words()}. {said}", fix


def find_source_problems(data: Data) -> list[Problem]:
    """Return the problems in the sources of a mix. Other data has none."""
    if not isinstance(data, Mix):
        return []
    if not data.sources:
        fix = Fix(remark="data.sources=[{option:jsonl,path:FILE_OR_FOLDER,weight:1},...]")
        return [Problem("data.sources", "[]", "needs at least one source", fix, "wrong_source")]
    found = [problem for each in enumerate(data.sources) for problem in _check_source(*each)]
    return found or list(_check_shares(data))


def _of_source(number: int, key: str, value: Any, why: str, fix: Fix | str) -> Problem:
    """Return the problem of a key of a source. A text as `fix` is the right value."""
    fix = Fix(f"data.sources.{number}.{key}={fix}") if isinstance(fix, str) else fix
    where = f"data.sources[{number}].{key}"
    return Problem(where, shown(format_value(value)), why, fix, "wrong_source")


def _check_source(number: int, source: dict[str, Any]) -> Iterator[Problem]:
    option = source.get("option")
    if option not in MIXED:
        ending = option_for(str(source.get("path", "")))
        meant = suggest_match(str(option), MIXED) or (ending if ending in MIXED else "jsonl")
        why = f"must be one of {', '.join(MIXED)}"
        yield _of_source(number, "option", option, why, str(meant))
        return
    fields = {**dict(class_fields(Weighted)), **dict(class_fields(MIXED[option]))}
    for key, known in fields.items():
        if known.default == "???" and key not in source:
            wanted = default_text(known, f"data.{key}")
            yield _of_source(number, key, "", f"{option} needs a value", wanted)
    for key, value in source.items():
        if key in SHARED:
            fix = Fix(remark=f"data.{key}={format_value(value)}, outside the sources")
            yield _of_source(number, key, value, "is shared by all sources", fix)
            continue
        if key not in fields:
            fix = Fix(remark=f"write {suggest_match(key, fields) or ', '.join({*fields} - SHARED)}")
            yield _of_source(number, key, value, f"unknown key of {option}", fix)
            continue
        known = fields[key]
        is_text = isinstance(value, str) and known.kind in (bool, int, float)
        if is_text or not is_valid_value(known, value):
            why = f"must be {known.words()}"
            yield _of_source(number, key, value, why, suggest_value(known, value))
        elif known.limit and value is not None and not known.limit.admits(value):
            why = f"must be {known.limit.describe(value)}"
            yield _of_source(number, key, value, why, format_value(known.default or 1))


def _check_shares(mix: Mix) -> Iterator[Problem]:
    """Yield a problem for each missing weight and each duplicate name."""
    weights, names = [source.get("weight") for source in mix.sources], source_names(mix)
    given = [weight for weight in weights if weight is not None]
    for number, (weight, name) in enumerate(zip(weights, names, strict=True)):
        if weight is None and (given or mix.is_stream):
            why = f"needs a weight, as {len(given)} of {len(weights)} sources have one"
            if mix.is_stream:
                why = "each source of a stream needs a weight"
            yield _of_source(number, "weight", None, why, format_value(min(given, default=1)))
        if name in names[:number]:
            why = f"is also the name of data.sources[{names.index(name)}]"
            of_hub = "name" in dict(class_fields(MIXED[mix.sources[number]["option"]]))
            fix = Fix(remark="each split once") if of_hub else f"{name}_{number}"
            yield _of_source(number, "name", name, why, fix)
