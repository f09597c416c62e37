"""Check single overrides before Hydra composes them, to report all errors together."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, get_args

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType

from eke.common.errors import Fix, Problem, is_placeholder
from eke.common.masking import masked
from eke.common.text import format_value, list_closest, override, quoted
from eke.config.compose.catalogue import (
    FIXED_FIELDS,
    SECRET_FIX,
    Catalogue,
    Field,
    default_text,
    is_interpolation,
    is_valid_value,
    merge_swept_values,
    shown,
    suggest_match,
    suggest_value,
)
from eke.config.compose.hydra_settings import (
    MAX_CHECKED,
    check_setting,
    is_hydras,
    sweep_values,
    why_unlisted,
)
from eke.config.compose.own_code import as_argument, as_target, wrong_target
from eke.config.compose.suggest import (
    NUMBER_KEYS,
    is_checkpoint,
    list_known_keys,
    nearest_key,
    shares_numbers,
    suggest_for_path,
    suggest_value_for_key,
)
from eke.config.foreign_names import find_retired
from eke.config.parts import OWN

_KEY = re.compile(r"[+~]*[A-Za-z_$][\w.$/-]*(?:@[\w.$-]*)?")


@lru_cache(maxsize=4096)
def parse(text: str) -> Override:
    """Parse an override with Hydra (1 ms, cached: do not modify). HydraException if invalid."""
    return OverridesParser.create().parse_override(text)


def find_problems(text: str, catalogue: Catalogue, multirun: bool = False) -> list[Problem]:
    """Return the problems of one override before composition. `multirun` permits sweeps."""
    if malformed := _check_shape(text, catalogue):
        return [malformed]
    try:
        parsed = parse(text)
    except Exception:  # of Hydra or ANTLR, or RecursionError
        return [_unparsable(text, catalogue)]
    return _check_parsed(parsed, catalogue, multirun)


def last_wins(texts: Sequence[str], catalogue: Catalogue) -> tuple[list[str], list[str]]:
    """Drop overrides that a later one replaces. Return the rest and the warnings."""
    last: dict[str, str] = {}  # without mappings, which Hydra merges
    kept, warnings = list[str](), list[str]()
    for text in reversed(texts):
        key, _, value = text.removeprefix("++").partition("=")
        # Keep +key, which Hydra rejects for an existing key, for an error message.
        key = key.removeprefix("+") if catalogue.is_entry(key.removeprefix("+")) else key
        later = last.get(key) if value else None
        if later is None:
            kept.append(text)
            if value and not value.startswith("{"):
                last[key] = text
        elif later.partition("=")[2] != value:
            warnings.append(f"{text} has no effect. A later override replaces it: {later}")
    return kept[::-1], warnings[::-1]


def suggest_fix(text: str, catalogue: Catalogue) -> Fix:
    """Return the override as a fix if valid, else the fix of its first problem."""
    problems = _next_problems(text, catalogue)
    return problems[0].fix if problems else Fix(text)


def _all_fixes(overrides: Iterable[str], catalogue: Catalogue) -> Fix:
    """Combine the fixes of all overrides. Return an empty fix if one has none."""
    fixes = [suggest_fix(override, catalogue) for override in overrides]
    return Fix(*(word for fix in fixes for word in fix.words)) if all(fixes) else Fix()


def _next_problems(text: str, catalogue: Catalogue) -> list[Problem]:
    """Return the problems of a proposed override, including the limits of its number."""
    problems = find_problems(text, catalogue)
    key, _, value = text.partition("=")
    field = catalogue.keys.get(key)
    if problems or not field or not field.limit:
        return problems
    number = parse(text).value()
    if not isinstance(number, int | float) or field.limit.admits(number):
        return []
    fix = Fix(f"{key}={format_value(field.limit.in_place_of(number, field.default))}")
    return [Problem(key, value, f"must be {field.limit.describe(number)}", fix, "limit")]


def _check_shape(text: str, catalogue: Catalogue) -> Problem | None:
    key, equals, value = text.partition("=")
    if not text.strip():
        return Problem(repr(text), "", "empty override, not key=value", id="missing_key")
    if not equals and not text.startswith("~"):
        return _no_equals(text, catalogue)
    if not key.strip("+~ \t\n"):
        found = suggest_value_for_key(value.strip(), catalogue)
        fix = Fix(found) if found else Fix()
        return Problem(shown(text), "", "no key before the equals sign", fix, "missing_key")
    if value.startswith("="):
        fix = suggest_fix(f"{key}={value.lstrip('=')}", catalogue)
        return Problem(key, shown(value), "has two equals signs", fix, "two_equals")
    if key != key.strip() or value != value.strip():
        fix = suggest_fix(f"{key.strip()}={value.strip()}", catalogue)
        return Problem(shown(text), "", "has a space around the key or the value", fix, "spaces")
    return None


def _no_equals(text: str, catalogue: Catalogue) -> Problem:
    name = text.strip().lstrip("+")
    why = "no equals sign. An override is key=value"
    group, separator, option = re.sub(r"[/: ]", "=", name, count=1).partition("=")
    if separator and (group in catalogue.options or group in catalogue.keys):
        fix = suggest_fix(f"{group}={option}", catalogue)
    elif row := find_retired(name):
        fix, why = _all_fixes(row.overrides("true"), catalogue), row.why("true")
    else:
        near = nearest_key(name, catalogue) or ""
        found = suggest_value_for_key(name, catalogue) or suggest_value_for_key(near, catalogue)
        fix = Fix(found) if found else Fix()
    return Problem(shown(text), "", why, fix, "missing_equals")


def _unparsable(text: str, catalogue: Catalogue) -> Problem:
    key, _, value = text.partition("=")
    if not _KEY.fullmatch(key):
        return _unknown_key(key.strip("+~"), value, catalogue)
    plain = key.strip("+~").partition("@")[0]
    field, entry = catalogue.keys.get(plain), catalogue.is_entry(plain)
    if not field and plain not in catalogue.options and not entry:
        return _unknown_key(plain, value, catalogue)
    if field and plain.endswith(".target"):
        fix = Fix(f"{key}=IMPORT_PATH")
        mistyped = Problem(key, shown(value), "must be an import path", fix, "unparsable")
        return wrong_target(key, value) or mistyped
    if entry or (field and field.kind is str):
        why = "unpaired quotes or characters with a meaning in Hydra's grammar. Quote the text"
        begun = value[:1] in ("'", '"') and value.count(value[0]) == 1
        fix = Fix(override(plain, value[1:] if begun else value))
        return Problem(key, shown(value), why, fix, "needs_quotes")
    if "/" in value and (found := suggest_for_path(plain, value)):
        why = f"not an option of {plain}. Set {found[-1].partition('=')[0]}"
        return Problem(key, shown(value), why, _all_fixes(found, catalogue), "unknown_option")
    bare = re.sub(r"[\[\](){}\"'$\\]", "", value).strip(", ")
    wanted = "" if field else list_closest(value, catalogue.options[plain], plain)
    wanted = field.words() if field else f"one of {wanted}"
    why = f"must be {wanted}. Brackets or quotes do not match"
    if wanted.startswith("a list"):
        bare = f"[{bare}]"
    fix = suggest_fix(f"{plain}={bare}", catalogue) if bare != value and bare.isascii() else Fix()
    if field and not fix:
        fix = Fix(f"{plain}={suggest_value(field, value)}")
    return Problem(key, shown(value), why, fix, "unparsable")


def _check_parsed(parsed: Override, catalogue: Catalogue, multirun: bool) -> list[Problem]:
    key, raw = parsed.key_or_group, _raw(parsed)
    plain = f"{key}={raw}"
    entry = catalogue.is_entry(key)  # `eke.rules` checks the values of `trainer.extra`
    if is_hydras(key):
        return [_deleted(key, catalogue)] if parsed.is_delete() else check_setting(parsed, raw)
    known = (catalogue.options, catalogue.keys, catalogue.sections)
    if not entry and not any(key in each for each in known):
        return [_unknown_key(key, raw, catalogue)]
    if parsed.is_delete():
        return [_deleted(key, catalogue)]
    if parsed.package is not None:
        why, path = f"{key} cannot be moved to another package", f"{key}@{parsed.package}"
        return [Problem(path, shown(raw), why, suggest_fix(plain, catalogue), "fixed_package")]
    if parsed.type is OverrideType.ADD and not entry:
        why = f"+ adds a new key. {key} already exists"
        return [Problem(f"+{key}", shown(raw), why, suggest_fix(plain, catalogue), "existing_key")]
    if parsed.is_sweep_override() or why_unlisted(parsed, catalogue):
        return _check_sweep(parsed, catalogue, multirun)
    if entry:
        missing = Problem(key, "(nothing)", "has no value. Remove it", id="missing_value")
        return [] if raw else [missing]
    if key in catalogue.options:
        problem = _check_option(key, parsed.value(), raw, catalogue)
    elif key in catalogue.sections:
        problem = _section(key, parsed.value(), raw, catalogue)
    else:
        problem = _check_value(key, parsed.value(), raw, catalogue)
    return [problem] if problem else []


def _raw(parsed: Override) -> str:
    return (parsed.input_line or "").partition("=")[2]


def _deleted(key: str, catalogue: Catalogue) -> Problem:
    section, _, name = key.rpartition(".")
    default = catalogue.defaults.get(section if name in FIXED_FIELDS else key)
    if default is None and (field := catalogue.keys.get(key)):
        default = default_text(field, key) or "''"
    fix = suggest_fix(f"{key}={default}", catalogue) if default else Fix()
    return Problem(f"~{key}", "", "cannot be removed from the configuration", fix, "not_removable")


def _unknown_key(key: str, raw: str, catalogue: Catalogue) -> Problem:
    # Other tools' names in any section: train.gradient_checkpointing, training_args.fp16.
    if row := find_retired(key) or find_retired(key.rpartition(".")[2]):
        wrong = [p for o in row.overrides(raw) for p in _next_problems(o, catalogue)]
        also = f". {wrong[0].value}: {wrong[0].why}" if wrong else ""
        fix = _all_fixes(row.overrides(raw), catalogue)
        return Problem(key, shown(raw), row.why(raw) + also, fix, "foreign_name")
    group, _, option = key.partition("/")
    if group in catalogue.options and option:
        fix = suggest_fix(f"{group}={option}", catalogue)
        why = f"options of {group} are set by {group}=OPTION"
        return Problem(key, shown(raw), why, fix, "option_as_key")
    if raw.lower() == "true" and (chosen := suggest_value_for_key(key, catalogue)):
        return Problem(key, shown(raw), "is an option, not a key", Fix(chosen), "option_as_key")
    if group.endswith("._target_") and group.split(".")[0] in OWN:
        return as_argument(f"{key}={raw}", chosen=False)
    found = nearest_key(key, catalogue)
    if not found:
        why = list_known_keys(key, catalogue)
        return Problem(shown(key), shown(raw), why, id="unknown_key")
    why = f"unknown key. Did you mean {found}?"
    wrong = _next_problems(f"{found}={raw}", catalogue) if raw else []
    section = key.rpartition(".")[0]
    if wrong and section in catalogue.sections and found.rpartition(".")[0] != section:
        why = f"unknown key. Keys of {section}: "
        why += list_closest(key.rpartition(".")[2], catalogue.names(section), section)
        return Problem(shown(key), shown(raw), why, id="unknown_key")
    why += f" {wrong[0].value}: {wrong[0].why}" if wrong and found in catalogue.keys else ""
    usual = Fix(suggest_value_for_key(found, catalogue) or found)
    fix = suggest_fix(f"{found}={raw}", catalogue) if raw else usual
    return Problem(shown(key), shown(raw), why, fix, "unknown_key")


def _check_sweep(parsed: Override, catalogue: Catalogue, multirun: bool) -> list[Problem]:
    """Return the problems of a sweep's values, and without `-m` the corrected `-m` command."""
    key, raw = parsed.key_or_group, _raw(parsed)
    why = why_unlisted(parsed, catalogue)
    if why or key.startswith("sweep."):
        right = suggest_value_for_key(key, catalogue) or f"{key}={quoted(raw)}"
        if raw.startswith(("{", "[")):  # sweep.product={seed:range(0,3)}
            right = re.sub(r"\w+\([^()]*\)", r"'\g<0>'", f"{key}={raw}")
        why = why or "applies to the entire sweep and takes one value"
        fix = Fix(right) if right != f"{key}={raw}" else Fix()
        return [Problem(key, shown(raw), why, fix, "no_sweep_key")]
    values = list(islice(sweep_values(parsed, catalogue), MAX_CHECKED))
    pieces = [each.strip() for each in raw.split(",")]
    if len(pieces) == len(values) and "(" not in raw:
        values = pieces  # keep `1.50`, whose parsed value is 1.5
    found = [(value, find_problems(f"{key}={value}", catalogue)) for value in values]
    wrong = [problem for _, problems in found for problem in problems]
    if multirun:
        return wrong
    fixed = [list(ps[0].fix.words) if ps else [f"{key}={value}"] for value, ps in found]
    typed = merge_swept_values(fixed) if wrong else [f"{key}={raw}"]
    why = "several values need -m"
    if key in catalogue.keys and catalogue.keys[key].kind is str:
        why += f". Quote one text with commas: {Fix(override(key, raw))}"
    fix = Fix("-m", *typed) if typed else Fix()
    return [*wrong, Problem(key, shown(raw), why, fix, "several_values")]


def _check_option(group: str, value: Any, raw: str, catalogue: Catalogue) -> Problem | None:
    options = catalogue.options[group]
    if value is None or value == "":
        fix = Fix(f"{group}={catalogue.without_effect(group)}")
        why = f"needs an option: {list_closest('', options, group)}"
        return Problem(group, shown(raw) or "(nothing)", why, fix, "missing_value")
    if isinstance(value, list):
        if group == "tracker" and len(value) > 1:
            return Problem(group, shown(raw), "a run has one tracker", id="several_values")
        why = "takes one option. Compare several in a sweep"
        fix = suggest_fix(f"{group}={','.join(map(str, value))}", catalogue)
        return Problem(group, shown(raw), why, fix, "several_values")
    if isinstance(value, dict):
        return _section(group, value, raw, catalogue)
    if isinstance(value, str) and value in options:
        return None
    if fix := as_target(group, str(value)):
        return Problem(group, shown(raw), "is an import path, no option", fix, "unknown_option")
    return _option_problem(group, value, raw, catalogue)


def _option_problem(group: str, value: Any, raw: str, catalogue: Catalogue) -> Problem:
    options = catalogue.options[group]
    text, fix = str(value), Fix()
    why = f"not an option of {group}: {list_closest(text, options, group)}"
    if row := find_retired(f"{group}={text}"):
        fix = _all_fixes(row.overrides(text), catalogue)
        return Problem(group, shown(raw), row.why(text), fix, "foreign_name")
    if isinstance(value, bool):  # group=true, group=off
        on = next((option for option in options if option != "none"), "none")
        chosen = on if value else catalogue.without_effect(group)
        return Problem(group, shown(raw), why, Fix(f"{group}={chosen}"), "unknown_option")
    if isinstance(value, int | float) and (key := NUMBER_KEYS.get(group)):
        why, fix = f"{why}. Did you mean {key}?", suggest_fix(f"{key}={raw}", catalogue)
        return Problem(group, shown(raw), why, fix, "unknown_option")
    near = suggest_match(text, options)
    # A name that is not understood must not turn a technique off.
    if near == "none" and not text.lower().startswith("non"):
        near = None
    # Option names of these groups contain sizes.
    if near and group in ("model", "hardware") and not shares_numbers(group, text, near):
        near = None
    is_name = near is None or (group == "model" and is_checkpoint(text, near))
    if is_name and (found := suggest_for_path(group, text)):
        why += f". Set {found[-1].partition('=')[0]}"
        why += f" ({near} has random weights)" if near else ""
        fix = _all_fixes(found, catalogue)
    elif near:
        fix = Fix(f"{group}={near}")
    else:
        if group == "model":
            why += ". Checkpoint: model=pretrained model.name_or_path=FOLDER_OR_HUB_NAME"
        if len(catalogue.folders) == 1:
            why += ". Own options need --config-dir FOLDER"
    return Problem(group, shown(raw), why, fix, "unknown_option")


def _section(section: str, value: Any, raw: str, catalogue: Catalogue) -> Problem:
    """Return the problem of a value for an entire section instead of one of its keys."""
    why = f"set one key of {section}: {list_closest('', catalogue.names(section), section)}"
    if isinstance(value, dict) and value:
        items = [override(f"{section}.{name}", item) for name, item in value.items()]
        wrong = [f"{p.key}: {p.why}" for item in items for p in _next_problems(item, catalogue)]
        why = ". ".join([why.partition(":")[0], *wrong]) if wrong else why
        return Problem(section, shown(raw), why, _all_fixes(items, catalogue), "section_value")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    key = NUMBER_KEYS.get(section) if is_number else {"paths": "paths.runs"}.get(section)
    usual = Fix(suggest_value_for_key(section, catalogue) or section)
    fix = suggest_fix(f"{key}={raw}", catalogue) if key and raw else usual
    return Problem(section, shown(raw) or "(nothing)", why, fix, "section_value")


def _check_value(key: str, value: Any, raw: str, catalogue: Catalogue) -> Problem | None:
    field = catalogue.keys[key]
    section, _, name = key.rpartition(".")
    if name in FIXED_FIELDS:
        why = f"is set by the option of {section}"
        usual = Fix(f"{section}={catalogue.defaults[section]}")
        fix = suggest_fix(f"{section}={raw}", catalogue) or usual
        return Problem(key, shown(raw), why, fix, "fixed_key")
    if raw == "":
        fix = Fix(f"{key}={default_text(field, key)}")
        return Problem(key, "(nothing)", f"must be {field.words()}", fix, "missing_value")
    if misread := _misread(field, value, raw):
        why = f"would be read as {shown(str(value))}. Quote the text"
        return Problem(key, shown(raw), why, Fix(override(key, misread)), "needs_quotes")
    if is_interpolation(value) or is_valid_value(field, value):
        is_target = name == "target" and section in OWN and not is_placeholder(f"{key}={raw}")
        return wrong_target(key, raw) if is_target else None
    if isinstance(value, list) and value and all(is_valid_value(field, item) for item in value):
        several = ",".join(override("", item)[1:] for item in value)
        fix = suggest_fix(f"{key}={several}", catalogue)
    elif isinstance(value, dict | list):
        fix = Fix(f"{key}={default_text(field, key)}")
    else:
        fix = Fix(f"{key}={suggest_value(field, value)}")
    return Problem(key, shown(raw), f"must be {field.words()}", fix, "wrong_type")


def _misread(field: Field, value: Any, raw: str) -> Any:
    """Return texts that Hydra's grammar converts: `1_000` to 1000, `true` to True. Else None."""
    if value is None and field.kind is str and not field.optional and os.path.exists(raw):
        return raw  # a file named null
    if isinstance(value, list) and get_args(field.kind)[:1] == (str,):
        texts = [each.strip("'\" ") for each in raw[1:-1].split(",")]
        return texts if _read_as_numbers(value) - set(texts) else None
    return raw if field.kind is str and _read_as_numbers([value]) - {raw} else None


def _read_as_numbers(values: Sequence[Any]) -> set[str]:
    return {str(each) for each in values if isinstance(each, bool | int | float)}


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
