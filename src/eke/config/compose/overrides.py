"""Check single overrides before Hydra composes, so that all errors are reported at once."""

import os
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, get_args

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType

from eke.common.errors import Fix, Problem
from eke.common.text import format_value, override, quoted
from eke.config.compose.catalogue import (
    FIXED_FIELDS,
    Catalogue,
    Field,
    admits,
    closest,
    default_text,
    is_interpolation,
    probably_meant,
    shown,
    swept,
)
from eke.config.compose.hydra_settings import (
    MAX_CHECKED,
    check_setting,
    is_hydras,
    sweep_values,
    why_unlisted,
)
from eke.config.compose.suggest import (
    NUMBER_KEYS,
    completed,
    is_checkpoint,
    nearest_key,
    nothing_near,
    of_elsewhere,
    shares_numbers,
)
from eke.config.foreign_names import find_retired

_KEY = re.compile(r"[+~]*[A-Za-z_$][\w.$/-]*(?:@[\w.$-]*)?")


@lru_cache(maxsize=4096)
def parse(text: str) -> Override:
    """Parse with Hydra (1 ms, hence cached: do not modify); HydraException for invalid text."""
    return OverridesParser.create().parse_override(text)


def find_problems(text: str, catalogue: Catalogue, multirun: bool = False) -> list[Problem]:
    """Problems of one override that need no composition; without `multirun` a sweep is one."""
    if malformed := _check_shape(text, catalogue):
        return [malformed]
    try:
        parsed = parse(text)
    except Exception:  # Hydra's exceptions, ANTLR's, RecursionError on deep nesting
        return [_unparsable(text, catalogue)]
    return _check_parsed(parsed, catalogue, multirun)


def last_wins(texts: Sequence[str], catalogue: Catalogue) -> tuple[list[str], list[str]]:
    """Drop each override that a later one replaces, and warn; Hydra merges mappings."""
    last: dict[str, str] = {}
    kept, warnings = list[str](), list[str]()
    for text in reversed(texts):
        key, _, value = text.removeprefix("++").partition("=")
        # +key adds, which Hydra refuses for a key that is there: it stays, to be explained.
        key = key.removeprefix("+") if catalogue.is_entry(key.removeprefix("+")) else key
        later = last.get(key) if value else None
        if later is None:
            kept.append(text)
            if value and not value.startswith("{"):
                last[key] = text
        elif later.partition("=")[2] != value:
            warnings.append(f"{text} has no effect: {later}, given after it, replaces it")
    return kept[::-1], warnings[::-1]


def suggest_fix(text: str, catalogue: Catalogue) -> Fix:
    """The override itself if valid, otherwise the fix of its first problem."""
    problems = _next_problems(text, catalogue)
    return problems[0].fix if problems else Fix(text)


def _all_fixes(overrides: Iterable[str], catalogue: Catalogue) -> Fix:
    """Combine the fixes of all overrides; empty if one of them has none."""
    fixes = [suggest_fix(override, catalogue) for override in overrides]
    return Fix(*(word for fix in fixes for word in fix.words)) if all(fixes) else Fix()


def _next_problems(text: str, catalogue: Catalogue) -> list[Problem]:
    """Problems of a proposed override, including the limits of its number."""
    problems = find_problems(text, catalogue)
    key, _, value = text.partition("=")
    field = catalogue.keys.get(key)
    if problems or not field or not field.limit:
        return problems
    number = parse(text).value()
    if not isinstance(number, int | float) or field.limit.admits(number):
        return []
    fix = Fix(f"{key}={format_value(field.limit.in_place_of(number, field.default))}")
    return [Problem(key, value, f"must be {field.limit.describe(number)}", fix)]


def _check_shape(text: str, catalogue: Catalogue) -> Problem | None:
    key, equals, value = text.partition("=")
    if not text.strip():
        return Problem(repr(text), "", "an override is key=value; this one is empty")
    if not equals and not text.startswith("~"):
        return _no_equals(text, catalogue)
    if not key.strip("+~ \t\n"):
        found = completed(value.strip(), catalogue)
        fix = Fix(found) if found else Fix()
        return Problem(shown(text), "", "there is no key before the equals sign", fix)
    if value.startswith("="):
        fix = suggest_fix(f"{key}={value.lstrip('=')}", catalogue)
        return Problem(key, shown(value), "one equals sign sets a value", fix)
    if key != key.strip() or value != value.strip():
        fix = suggest_fix(f"{key.strip()}={value.strip()}", catalogue)
        return Problem(shown(text), "", "there is a space around the key or the value", fix)
    return None


def _no_equals(text: str, catalogue: Catalogue) -> Problem:
    name = text.strip().lstrip("+")
    why = "an override is key=value; there is no equals sign"
    group, separator, option = re.sub(r"[/: ]", "=", name, count=1).partition("=")
    if separator and (group in catalogue.options or group in catalogue.keys):
        return Problem(shown(text), "", why, suggest_fix(f"{group}={option}", catalogue))
    if row := find_retired(name):
        fix = _all_fixes(row.overrides("true"), catalogue)
        return Problem(shown(text), "", row.why("true"), fix)
    found = completed(name, catalogue) or completed(nearest_key(name, catalogue) or "", catalogue)
    return Problem(shown(text), "", why, Fix(found) if found else Fix())


def _unparsable(text: str, catalogue: Catalogue) -> Problem:
    key, _, value = text.partition("=")
    if not _KEY.fullmatch(key):
        return _unknown(key.strip("+~"), value, catalogue)
    plain = key.strip("+~").partition("@")[0]
    field = catalogue.keys.get(plain)
    if not field and plain not in catalogue.options:
        return _unknown(plain, value, catalogue)
    if field and field.kind is str:
        why = "has characters with a meaning in Hydra's grammar, or unpaired quotes; quote it"
        begun = value[:1] in ("'", '"') and value.count(value[0]) == 1
        return Problem(key, shown(value), why, Fix(override(plain, value[1:] if begun else value)))
    if "/" in value and (found := of_elsewhere(plain, value)):
        why = f"not an option of {plain}; it goes to {found[-1].partition('=')[0]}"
        return Problem(key, shown(value), why, _all_fixes(found, catalogue))
    bare = re.sub(r"[\[\](){}\"'$\\]", "", value).strip(", ")
    wanted = field.words() if field else f"one of {', '.join(catalogue.options[plain])}"
    why = f"brackets or quotes do not pair up, or it is no value; {wanted} is wanted"
    if wanted.startswith("a list"):
        bare = f"[{bare}]"
    fix = suggest_fix(f"{plain}={bare}", catalogue) if bare != value and bare.isascii() else Fix()
    if field and not fix:
        fix = Fix(f"{plain}={probably_meant(field, value)}")
    return Problem(key, shown(value), why, fix)


def _check_parsed(parsed: Override, catalogue: Catalogue, multirun: bool) -> list[Problem]:
    key, raw = parsed.key_or_group, _raw(parsed)
    plain = f"{key}={raw}"
    entry = catalogue.is_entry(key)  # `eke.rules` checks the value of `trainer.extra.debug=...`
    if is_hydras(key):
        return [_deleted(key, catalogue)] if parsed.is_delete() else check_setting(parsed, raw)
    known = (catalogue.options, catalogue.keys, catalogue.sections)
    if not entry and not any(key in each for each in known):
        return [_unknown(key, raw, catalogue)]
    if parsed.is_delete():
        return [_deleted(key, catalogue)]
    if parsed.package is not None:
        why = f"what {key} sets has a fixed place, @{parsed.package} cannot move it"
        return [Problem(f"{key}@{parsed.package}", shown(raw), why, suggest_fix(plain, catalogue))]
    if parsed.type is OverrideType.ADD and not entry:
        why = f"+ adds a new key, and {key} is there already"
        return [Problem(f"+{key}", shown(raw), why, suggest_fix(plain, catalogue))]
    if parsed.is_sweep_override() or why_unlisted(parsed, catalogue):
        return _check_sweep(parsed, catalogue, multirun)
    if entry:
        return [] if raw else [Problem(key, "(nothing)", "no value; remove it")]
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
    return Problem(f"~{key}", "", "nothing can be removed from the configuration", fix)


def _unknown(key: str, raw: str, catalogue: Catalogue) -> Problem:
    # In any section: train.gradient_checkpointing, training_args.fp16.
    if row := find_retired(key) or find_retired(key.rpartition(".")[2]):
        wrong = [p for o in row.overrides(raw) for p in _next_problems(o, catalogue)]
        also = f"; {wrong[0].value}: {wrong[0].why}" if wrong else ""
        fix = _all_fixes(row.overrides(raw), catalogue)
        return Problem(key, shown(raw), row.why(raw) + also, fix)
    group, _, option = key.partition("/")
    if group in catalogue.options and option:
        fix = suggest_fix(f"{group}={option}", catalogue)
        return Problem(key, shown(raw), f"an option of {group} is chosen by {group}=OPTION", fix)
    if raw.lower() == "true" and (chosen := completed(key, catalogue)):
        return Problem(key, shown(raw), "is an option here", Fix(chosen))
    found, own = nearest_key(key, catalogue), ""
    if re.search(r"_target_|class|loss|metric|callback", key) or re.search(r"\w[.:][A-Z]", raw):
        own = "; your own code cannot be named here (docs/how-to/use.md)"
    if not found:
        return Problem(shown(key), shown(raw), nothing_near(key, catalogue) + own)
    why = f"there is no such key; did you mean {found}?"
    wrong = _next_problems(f"{found}={raw}", catalogue) if raw else []
    section = key.rpartition(".")[0]
    if wrong and section in catalogue.sections and found.rpartition(".")[0] != section:
        why = f"there is no such key; {section} has {', '.join(catalogue.names(section))}"
        return Problem(shown(key), shown(raw), why + own)
    why += f" {wrong[0].value}: {wrong[0].why}" if wrong and found in catalogue.keys else ""
    usual = Fix(completed(found, catalogue) or found)
    fix = suggest_fix(f"{found}={raw}", catalogue) if raw else usual
    return Problem(shown(key), shown(raw), why, fix)


def _check_sweep(parsed: Override, catalogue: Catalogue, multirun: bool) -> list[Problem]:
    """Problems of single values; without `-m` also one whose fix is the corrected `-m` form."""
    key, raw = parsed.key_or_group, _raw(parsed)
    why = why_unlisted(parsed, catalogue)
    if why or key.startswith("sweep."):
        right = completed(key, catalogue) or f"{key}={quoted(raw)}"
        if raw.startswith(("{", "[")):  # sweep.product={seed:range(0,3)}
            right = re.sub(r"\w+\([^()]*\)", r"'\g<0>'", f"{key}={raw}")
        why = why or "is about the whole sweep, and has one value"
        fix = Fix(right) if right != f"{key}={raw}" else Fix()
        return [Problem(key, shown(raw), why, fix)]
    values = list(islice(sweep_values(parsed, catalogue), MAX_CHECKED))
    pieces = [each.strip() for each in raw.split(",")]
    if len(pieces) == len(values) and "(" not in raw:
        values = pieces  # of `1.50`, the parsed value is 1.5
    found = [(value, find_problems(f"{key}={value}", catalogue)) for value in values]
    wrong = [problem for _, problems in found for problem in problems]
    if multirun:
        return wrong
    fixed = [list(ps[0].fix.words) if ps else [f"{key}={value}"] for value, ps in found]
    typed = swept(fixed) if wrong else [f"{key}={raw}"]
    why = "several values make a sweep, and a sweep needs -m"
    if key in catalogue.keys and catalogue.keys[key].kind is str:
        why += f"; one text with commas is quoted: {Fix(override(key, raw))}"
    return [*wrong, Problem(key, shown(raw), why, Fix("-m", *typed) if typed else Fix())]


def _check_option(group: str, value: Any, raw: str, catalogue: Catalogue) -> Problem | None:
    options = catalogue.options[group]
    if value is None or value == "":
        fix = Fix(f"{group}={catalogue.without_effect(group)}")
        why = f"{group} always has an option: {', '.join(options)}"
        return Problem(group, shown(raw) or "(nothing)", why, fix)
    if isinstance(value, list):
        if group == "tracker" and len(value) > 1:
            return Problem(group, shown(raw), "a run has one tracker")
        why = f"{group} takes one option; several are compared in a sweep"
        fix = suggest_fix(f"{group}={','.join(map(str, value))}", catalogue)
        return Problem(group, shown(raw), why, fix)
    if isinstance(value, dict):
        return _section(group, value, raw, catalogue)
    if isinstance(value, str) and value in options:
        return None
    return _wrong_option(group, value, raw, catalogue)


def _wrong_option(group: str, value: Any, raw: str, catalogue: Catalogue) -> Problem:
    options = catalogue.options[group]
    why = f"not an option of {group}: {', '.join(options)}"
    text = str(value)
    if row := find_retired(f"{group}={text}"):
        return Problem(group, shown(raw), row.why(text), _all_fixes(row.overrides(text), catalogue))
    if isinstance(value, bool):
        on = next((option for option in options if option != "none"), "none")
        chosen = on if value else catalogue.without_effect(group)
        return Problem(group, shown(raw), why, Fix(f"{group}={chosen}"))
    if isinstance(value, int | float) and (key := NUMBER_KEYS.get(group)):
        why += f"; did you mean {key}?"
        return Problem(group, shown(raw), why, suggest_fix(f"{key}={raw}", catalogue))
    near = closest(text, options)
    # These groups have sizes in the names of their options.
    if near and group in ("model", "hardware") and not shares_numbers(group, text, near):
        near = None
    is_name = near is None or (group == "model" and is_checkpoint(text, near))
    if is_name and (found := of_elsewhere(group, text)):
        why += f"; it goes to {found[-1].partition('=')[0]}"
        why += f" ({near} has random weights)" if near else ""
        return Problem(group, shown(raw), why, _all_fixes(found, catalogue))
    if near is None and group == "model":
        why += "; a checkpoint is model=pretrained model.name_or_path=FOLDER_OR_HUB_NAME"
    if near is None and len(catalogue.folders) == 1:
        why += "; an option of your own is found by --config-dir FOLDER"
    return Problem(group, shown(raw), why, Fix(f"{group}={near}") if near else Fix())


def _section(section: str, value: Any, raw: str, catalogue: Catalogue) -> Problem:
    """Explain a value for a whole section instead of one of its keys."""
    why = f"{section} has keys, set one by one: {', '.join(catalogue.names(section))}"
    if isinstance(value, dict) and value:
        items = [override(f"{section}.{name}", item) for name, item in value.items()]
        return Problem(section, shown(raw), why, _all_fixes(items, catalogue))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    key = NUMBER_KEYS.get(section) if is_number else {"paths": "paths.runs"}.get(section)
    usual = Fix(completed(section, catalogue) or section)
    fix = suggest_fix(f"{key}={raw}", catalogue) if key and raw else usual
    return Problem(section, shown(raw) or "(nothing)", why, fix)


def _check_value(key: str, value: Any, raw: str, catalogue: Catalogue) -> Problem | None:
    field = catalogue.keys[key]
    section, _, name = key.rpartition(".")
    if name in FIXED_FIELDS:
        return _fixed(section, name, raw, catalogue)
    if raw == "":
        why = f"no value; {field.words()} is wanted"
        return Problem(key, "(nothing)", why, Fix(f"{key}={default_text(field, key)}"))
    if misread := _misread(field, value, raw):
        why = f"would become {shown(str(value))}; a text is quoted"
        return Problem(key, shown(raw), why, Fix(override(key, misread)))
    if is_interpolation(value) or admits(field, value):
        return None
    why = f"{field.words()} is wanted"
    if isinstance(value, list) and value and all(admits(field, item) for item in value):
        several = ",".join(override("", item)[1:] for item in value)
        return Problem(key, shown(raw), why, suggest_fix(f"{key}={several}", catalogue))
    if isinstance(value, dict | list):
        return Problem(key, shown(raw), why, Fix(f"{key}={default_text(field, key)}"))
    return Problem(key, shown(raw), why, Fix(f"{key}={probably_meant(field, value)}"))


def _misread(field: Field, value: Any, raw: str) -> Any:
    """The text, or texts, that Hydra's grammar reads as others: `1_000` as 1000, `true` as True."""
    if value is None and field.kind is str and not field.optional and os.path.exists(raw):
        return raw  # a file of the name null
    if isinstance(value, list) and get_args(field.kind)[:1] == (str,):
        texts = [each.strip("'\" ") for each in raw[1:-1].split(",")]
        return texts if _read_as_numbers(value) - set(texts) else None
    return raw if field.kind is str and _read_as_numbers([value]) - {raw} else None


def _read_as_numbers(values: Sequence[Any]) -> set[str]:
    return {str(each) for each in values if isinstance(each, bool | int | float)}


def _fixed(section: str, name: str, raw: str, catalogue: Catalogue) -> Problem:
    """Explain overrides of fixed keys: `optimizer.option=sgd`, `model.family=bert`."""
    why = f"is set by the option of {section}, not by hand"
    usual = Fix(f"{section}={catalogue.defaults[section]}")
    fix = suggest_fix(f"{section}={raw}", catalogue) or usual
    return Problem(f"{section}.{name}", shown(raw), why, fix)
