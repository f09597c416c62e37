"""What is wrong with one override, found before Hydra composes: so all mistakes are told at once.

Hydra's own parser decides what the text means; the catalogue decides whether that exists.
"""

import re
from functools import lru_cache
from itertools import islice
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType

from eke.compose.catalogue import FIXED_FIELDS, Catalogue
from eke.compose.retired import Retired, find_retired
from eke.compose.suggest import completed, nearest_key, number_key, text_key
from eke.compose.values import admits, default_text, is_interpolation, probably_meant
from eke.compose.wording import as_typed, closest, first_line, multirun, quoted, shown
from eke.errors import Problem
from eke.paths import program, user_path

# A sweep over more values than this is checked at its first ones only.
_MAX_SWEEP_VALUES = 100
_KEY = re.compile(r"[+~]*[A-Za-z_$][\w.$/-]*(?:@[\w.$-]*)?")


@lru_cache(maxsize=4096)
def parse(text: str) -> Override:
    """What Hydra understands; remembered, since parsing costs it a millisecond. Not to be changed.

    Raises:
        HydraException: the text is not in Hydra's grammar.
    """
    return OverridesParser.create().parse_override(text)


def find_problems(text: str, catalogue: Catalogue) -> list[Problem]:
    """Everything wrong with one override that can be known without composing.

    A sweep is a problem here: one composition has one value per key. Its fix is the `-m` form.
    """
    malformed = _check_shape(text, catalogue)
    if malformed:
        return [malformed]
    try:
        parsed = parse(text)
    except Exception as error:  # its own exceptions, ANTLR's, RecursionError on deep nesting
        return [_unparsable(text, error, catalogue)]
    return _check_parsed(parsed, catalogue)


def mend(text: str, catalogue: Catalogue) -> str:
    """What to type instead of `text`, which is right or has its own fix."""
    problems = find_problems(text, catalogue)
    return problems[0].fix if problems else as_typed(text)


# --- the shape of the text ----------------------------------------------------------------------


def _check_shape(text: str, catalogue: Catalogue) -> Problem | None:
    key, equals, value = text.partition("=")
    if not text.strip():
        return Problem(repr(text), "", "an override is key=value; this one is empty")
    if not text.strip("+~ \t\n"):
        return Problem(shown(text), "", "there is no key behind it")
    if text.startswith("-"):
        plain = text.lstrip("-")
        fix = mend(plain if equals else f"{plain}=true", catalogue)
        return Problem(shown(text), "", "settings are typed as key=value, without dashes", fix)
    if not equals and not text.startswith("~"):
        return _no_equals(text, catalogue)
    if equals and not key.strip("+~ \t\n"):
        found = completed(value.strip(), catalogue)
        fix = as_typed(found) if found else ""
        return Problem(shown(text), "", "there is no key before the equals sign", fix)
    if value.startswith("="):
        fix = mend(f"{key}={value.lstrip('=')}", catalogue)
        return Problem(key, shown(value), "one equals sign sets a value", fix)
    if key != key.strip() or (equals and value != value.strip()):
        fix = mend(f"{key.strip()}={value.strip()}", catalogue)
        return Problem(shown(text), "", "there is a space around the key or the value", fix)
    return None


def _no_equals(text: str, catalogue: Catalogue) -> Problem:
    name = text.strip().lstrip("+")
    why = "an override is key=value; there is no equals sign"
    group, separator, option = re.sub(r"[/: ]", "=", name, count=1).partition("=")
    if separator and group in catalogue.options:
        return Problem(shown(text), "", why, mend(f"{group}={option}", catalogue))
    row = find_retired(name)
    if row:
        return Problem(
            shown(text), "", f"{row.why}, as key=value", _instead(row, "true", catalogue)
        )
    found = completed(name, catalogue) or completed(nearest_key(name, catalogue) or "", catalogue)
    return Problem(shown(text), "", why, as_typed(found) if found else "")


def _unparsable(text: str, error: Exception, catalogue: Catalogue) -> Problem:
    if several := _settings_in(text, catalogue):
        why = "several settings in one word, as a shell makes one of what stands in quotes"
        return Problem(shown(text), "", why, " ".join(map(as_typed, several)))
    key, _, value = text.partition("=")
    if not _KEY.fullmatch(key):
        return _unknown(key.strip("+~"), value, catalogue)
    plain = key.strip("+~").partition("@")[0]
    field = catalogue.keys.get(plain)
    if not field and plain not in catalogue.options:
        return _unknown(plain, value, catalogue)
    if field and field.kind is str:
        why = "has characters with a meaning in Hydra's grammar, or unpaired quotes; quote it"
        return Problem(key, shown(value), why, as_typed(f"{plain}={quoted(value)}"))
    bare = re.sub(r"[\[\](){}\"'$\\]", "", value)
    why = f"brackets or quotes do not pair up, or it is no value: {shown(first_line(error))}"
    fix = mend(f"{plain}={bare}", catalogue) if bare != value and bare.isascii() else ""
    return Problem(key, shown(value), why, fix or _default(plain, catalogue))


def _settings_in(text: str, catalogue: Catalogue) -> list[str]:
    """Overrides that were quoted together, each of a known key; empty for anything else."""
    words = text.split()
    keys = [word.partition("=")[0].lstrip("+") for word in words if "=" in word]
    known = [key for key in keys if key in catalogue.keys or key in catalogue.options]
    return words if len(words) > 1 and len(known) == len(words) else []


def _default(key: str, catalogue: Catalogue) -> str:
    return as_typed(completed(key, catalogue) or key)


# --- what the text says -------------------------------------------------------------------------


def _check_parsed(parsed: Override, catalogue: Catalogue) -> list[Problem]:
    key, raw = parsed.key_or_group, _raw(parsed)
    known = key in catalogue.options or key in catalogue.keys or key in catalogue.sections
    plain = f"{key}={raw}"
    if re.match(r"hydra[./]|hydra$", key):
        return _check_hydra(parsed)
    if catalogue.is_entry(key):
        return _check_entry(parsed, catalogue)
    if not known:
        return [_unknown(key, raw, catalogue)]
    if parsed.is_delete():
        return [_deleted(key, catalogue)]
    if parsed.package is not None:
        why = f"what {key} sets has a fixed place, @{parsed.package} cannot move it"
        return [Problem(f"{key}@{parsed.package}", shown(raw), why, mend(plain, catalogue))]
    if parsed.type is OverrideType.ADD:
        why = f"+ adds a new key, and {key} is there already"
        return [Problem(f"+{key}", shown(raw), why, mend(plain, catalogue))]
    if parsed.is_sweep_override():
        return _check_sweep(parsed, catalogue)
    value = parsed.value()
    if key in catalogue.options:
        problem = _check_option(key, value, raw, catalogue)
    elif key in catalogue.sections:
        problem = _section(key, value, raw, catalogue)
    else:
        problem = _check_value(key, value, raw, catalogue)
    return [problem] if problem else []


def _check_entry(parsed: Override, catalogue: Catalogue) -> list[Problem]:
    """`trainer.extra.debug=...`: what it may be, `eke.check` knows."""
    key, raw = parsed.key_or_group, _raw(parsed)
    if parsed.is_delete():
        why = "nothing can be removed from the configuration"
        return [Problem(f"~{key}", "", why, "leave it out")]
    if parsed.is_sweep_override():
        return _check_sweep(parsed, catalogue)
    if not raw:
        return [Problem(key, "(nothing)", "no value", "leave it out")]
    return []


def as_hydra_takes_it(text: str, catalogue: Catalogue) -> str:
    """An override for Hydra's own ears: it adds to a mapping only what is marked as an addition.

    `++precision=bf16`, set or add, is what a W&B agent types; Hydra takes it for keys only.
    """
    key, equals, value = text.lstrip("+").partition("=")
    mapping = key in catalogue.keys and catalogue.keys[key].kind is dict
    if mapping or catalogue.is_entry(key):
        return f"++{key}{equals}{value}"
    return text.removeprefix("++") if key in catalogue.options else text


def _raw(parsed: Override) -> str:
    return (parsed.input_line or "").partition("=")[2]


def _check_hydra(parsed: Override) -> list[Problem]:
    key, raw, text = parsed.key_or_group, _raw(parsed), parsed.input_line or ""
    if re.match(r"hydra[./](launcher|sweeper)\b|hydra\.(mode|sweep)\b", key):
        why = "takes effect in a sweep only; without -m one run would start here"
        command = multirun() if key == "hydra.mode" else f"{multirun()} {as_typed(text)}"
        return [Problem(key, shown(raw), why, command)]
    if key == "hydra.searchpath":
        why = "your own options are found in a folder named by a flag"
        return [Problem(key, shown(raw), why, "--config-dir FOLDER")]
    if parsed.is_sweep_override():
        return [Problem(key, shown(raw), "Hydra's own settings cannot be swept over")]
    return []


def _deleted(key: str, catalogue: Catalogue) -> Problem:
    why = "nothing can be removed from the configuration"
    if key in catalogue.options:
        fix = f"{key}={catalogue.without_effect(key)}"
        return Problem(f"~{key}", "", f"{why}; choose the option without effect", fix)
    field = catalogue.keys.get(key)
    fix = f"{key}=null" if field and field.optional else _default(key, catalogue)
    return Problem(f"~{key}", "", why, fix)


def _unknown(key: str, raw: str, catalogue: Catalogue) -> Problem:
    # Whatever section it was looked for in: train.gradient_checkpointing, training_args.fp16.
    row = find_retired(key) or find_retired(key.rpartition(".")[2])
    if row:
        return Problem(key, shown(raw), _why(row, raw, catalogue), _instead(row, raw, catalogue))
    inner = key.rpartition("/")[2]
    if inner != key and inner in catalogue.options:
        why = f"is no group; {inner} is"
        return Problem(key, shown(raw), why, mend(f"{inner}={raw}", catalogue))
    group, _, option = key.partition("/")
    if group in catalogue.options and option:
        fix = mend(f"{group}={option}", catalogue)
        return Problem(key, shown(raw), f"an option of {group} is typed {group}=OPTION", fix)
    found = nearest_key(key, catalogue)
    if not found:
        why = f"there is no such key or group; `{program()} --help` lists them"
        return Problem(shown(key), shown(raw), why)
    why = f"there is no such key; did you mean {found}?"
    fix = mend(f"{found}={raw}", catalogue) if raw else _default(found, catalogue)
    return Problem(shown(key), shown(raw), why, fix)


def _instead(row: Retired, raw: str, catalogue: Catalogue) -> str:
    return " ".join(mend(override, catalogue) for override in row.overrides(raw))


def _why(row: Retired, raw: str, catalogue: Catalogue) -> str:
    """The row's reason, and what is wrong with its override for this value, if anything."""
    for override in row.overrides(raw):
        for problem in find_problems(override, catalogue):
            return f"{row.why}; {problem.value}: {problem.why}"
    return row.why


def _check_sweep(parsed: Override, catalogue: Catalogue) -> list[Problem]:
    """The `-m` form, after the mistakes in single values; these are mended in the form."""
    key, raw, element = parsed.key_or_group, _raw(parsed), parsed.value()
    if isinstance(element, Glob):
        values = element.filter(list(catalogue.options.get(key, {})))
    else:
        values = [str(v) for v in islice(_values(parsed), _MAX_SWEEP_VALUES)]
    wrong: list[Problem] = []
    right: list[str] = []
    for value in values:
        found = find_problems(f"{key}={value}", catalogue)
        wrong += found
        if not found:
            right.append(value)
        elif found[0].fix.startswith(f"{key}="):
            right.append(found[0].fix.removeprefix(f"{key}="))
    typed = f"{key}={','.join(dict.fromkeys(right))}" if wrong else f"{key}={raw}"
    why = "several values make a sweep, and a sweep needs -m"
    if key in catalogue.keys and catalogue.keys[key].kind is str:
        why += f"; one text with commas is quoted: {as_typed(f'{key}={quoted(raw)}')}"
    return [*wrong, Problem(key, shown(raw), why, f"{multirun()} {as_typed(typed)}")]


def _values(parsed: Override) -> Any:
    """The values of a sweep as text; an interval has none until an optimizer asks for them."""
    return iter(()) if parsed.is_interval_sweep() else parsed.sweep_string_iterator()


# --- a value for a group, a section, a key ------------------------------------------------------


def _check_option(group: str, value: Any, raw: str, catalogue: Catalogue) -> Problem | None:
    options = catalogue.options[group]
    if value is None or value == "":
        fix = f"{group}={catalogue.without_effect(group)}"
        why = f"{group} always has an option: {', '.join(options)}"
        return Problem(group, shown(raw) or "(nothing)", why, fix)
    if isinstance(value, list):
        return _option_list(group, value, raw, catalogue)
    if isinstance(value, dict):
        return _section(group, value, raw, catalogue)
    if isinstance(value, str) and value in options:
        return None
    return _wrong_option(group, value, raw, catalogue)


def _wrong_option(group: str, value: Any, raw: str, catalogue: Catalogue) -> Problem:
    options = catalogue.options[group]
    why = f"not an option of {group}: {', '.join(options)}"
    text = str(value)
    row = find_retired(f"{group}={text}")
    if row:
        return Problem(group, shown(raw), row.why, _instead(row, text, catalogue))
    if isinstance(value, bool):
        on = next((option for option in options if option != "none"), "none")
        return Problem(
            group, shown(raw), why, f"{group}={on if value else catalogue.without_effect(group)}"
        )
    key = number_key(group) if isinstance(value, int | float) else None
    if key:
        return Problem(
            group, shown(raw), f"{why}; did you mean {key}?", mend(f"{key}={raw}", catalogue)
        )
    if group == "data" and re.search(r"[/\\]|\.\w+$", text):
        fix = f"data=text {mend(f'data.path={raw}', catalogue)}"
        return Problem(group, shown(raw), f"{why}; a path goes to data.path", fix)
    near = closest(text.rpartition("/")[2], options) or closest(text, options)
    if group == "model" and "/" in text and (near is None or user_path(text).is_dir()):
        fix = f"model=pretrained {mend(f'model.name_or_path={raw}', catalogue)}"
        return Problem(group, shown(raw), f"{why}; a checkpoint goes to model.name_or_path", fix)
    if near is None and len(catalogue.folders) == 1:
        why += "; an option of your own is found by --config-dir FOLDER"
    fix = f"{group}={near or catalogue.defaults.get(group) or next(iter(options))}"
    return Problem(group, shown(raw), why, fix)


def _option_list(group: str, value: list[Any], raw: str, catalogue: Catalogue) -> Problem:
    why = f"{group} takes one option; several are compared in a sweep"
    if len(value) <= 1:
        only = value[0] if value else ""
        return Problem(group, shown(raw), why, mend(f"{group}={only}", catalogue))
    fix = mend(f"{group}={','.join(str(v) for v in value)}", catalogue)
    return Problem(group, shown(raw), why, fix)


def _section(section: str, value: Any, raw: str, catalogue: Catalogue) -> Problem:
    """A value for a whole section, which has keys instead."""
    names = ", ".join(catalogue.names(section))
    why = f"{section} has keys of its own, set one by one: {names}"
    if isinstance(value, dict) and value:
        items = [f"{section}.{name}={item}" for name, item in value.items()]
        return Problem(section, shown(raw), why, " ".join(mend(i, catalogue) for i in items))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    key = number_key(section) if is_number else text_key(section)
    fix = mend(f"{key}={raw}", catalogue) if key and raw else _default(section, catalogue)
    return Problem(section, shown(raw) or "(nothing)", why, fix)


def _check_value(key: str, value: Any, raw: str, catalogue: Catalogue) -> Problem | None:
    field = catalogue.keys[key]
    section, _, name = key.rpartition(".")
    if name in FIXED_FIELDS:
        return _fixed(section, name, value, raw, catalogue)
    if raw == "":
        why = f"no value; {field.words()} is wanted"
        return Problem(key, "(nothing)", why, as_typed(f"{key}={default_text(field, key)}"))
    if is_interpolation(value) or admits(field, value):
        return None
    why = f"{field.words()} is wanted"
    if isinstance(value, dict | list):
        return Problem(key, shown(raw), why, as_typed(f"{key}={default_text(field, key)}"))
    return Problem(key, shown(raw), why, as_typed(f"{key}={probably_meant(field, value)}"))


def _fixed(section: str, name: str, value: Any, raw: str, catalogue: Catalogue) -> Problem:
    """`optimizer.option=sgd`, `model.family=bert`: what an option's file says about itself."""
    why = f"is set by the option of {section}, not by hand"
    if name == "family":
        option = next(
            (o for o in catalogue.options[section] if re.search(rf"tiny_{re.escape(raw)}$", o)),
            catalogue.defaults[section],
        )
        return Problem(f"{section}.{name}", shown(raw), why, f"{section}={option}")
    fix = mend(f"{section}={raw}", catalogue) or f"{section}={catalogue.defaults[section]}"
    return Problem(f"{section}.{name}", shown(raw), why, fix)
