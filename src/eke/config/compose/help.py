"""Generate the pages of `python train.py --help` and `--help GROUP` from `conf/` and schema."""

from collections.abc import Iterable
from pathlib import Path

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.paths import program
from eke.common.screen import fields, paint, plain, width, wrap
from eke.common.text import list_closest
from eke.config.compose.catalogue import (
    GROUPS,
    Catalogue,
    KeyRow,
    key_rows,
    make_catalogue,
    option_summaries,
    suggest_match,
    title,
)
from eke.config.compose.suggest import nearest_key
from eke.config.schema import ENTRIES
from eke.config.schema.fields import summary

_IN_FULL = (
    "model", "task", "data", "precision", "optimizer", "memory", "attention", "compile",
    "distributed", "peft",
)  # fmt: skip
"""Groups on the first page with their options."""

COMMON_KEYS = {
    "train.steps": "optimizer steps",
    "batch.per_device": "samples per device and pass",
    "batch.accumulation": "passes per step",
    "optimizer.lr": "peak learning rate",
    "data.seq_len": "tokens per sample",
    "train.checkpoint_every": "steps between checkpoints",
    "seed": "seed of weights and sample order",
    "plan_only": "print the plan and exit",
    "rerun": "run again, even if finished",
    "paths.runs": "folder of all runs",
}
"""Keys on the first page -> short description."""

ALL = "all"
"""Topic with all keys: `--help all`, `--help optimizer=all`."""

_USAGE = (
    ("PROGRAM [group=option ...] [key=value ...]", "one run"),
    ("PROGRAM -m group=a,b [key=1,2 ...]", "a sweep: all pairs"),
    ("PROGRAM --help GROUP", "keys of a group"),
)
_EXAMPLES = (
    "PROGRAM precision=bf16 optimizer=adafactor",
    "PROGRAM -m precision=fp32,bf16 seed=0,1",
    "PROGRAM recipe=low_memory model=llama_1b plan_only=true",
)
_TAIL = (
    "flags: -m, -q, -v, --color WHEN, --config-dir FOLDER (own options), --cell, --version, "
    "--hydra-help. --cfg job shows all values. `eke --help` lists the other commands."
)


def help_text(config_dir: Path | None = None, topic: str = "", columns: int | None = None) -> str:
    """Return the help page of a topic, or the first page without one.

    Topics are a group or section, an option (`optimizer=muon`), `optimizer=all` and `all`.
    `columns` is the width of the page, by default the terminal's.
    """
    catalogue = make_catalogue(config_dir)
    columns = min(columns or width(), 100)  # longer lines are harder to read
    if topic == ALL:
        sections = ["", *dict.fromkeys([*catalogue.options, *catalogue.sections])]
        blocks = [block for each in sections for block in _section(each, catalogue, columns)]
    elif topic:
        blocks = _topic_page(topic, catalogue, columns)
    else:
        blocks = _first_page(catalogue, columns)
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _first_page(catalogue: Catalogue, columns: int) -> list[list[str]]:
    usage = [(each.replace("PROGRAM", program()), about) for each, about in _USAGE]
    texts = ((f"{'' if n else 'usage:':<6} {each}", about) for n, (each, about) in enumerate(usage))
    lines = fields(texts, columns)
    head = wrap("Train Transformers efficiently: choose techniques, compare runs, keep results.",
                columns)  # fmt: skip
    short = [group for group in catalogue.options if group not in _IN_FULL]
    groups = [_heading("groups (first option: the default)", "more: --help GROUP", columns)]
    for group in catalogue.options:
        if group not in short:
            name = paint(group, "cyan")
            groups += fields([(name, _few_options(group, catalogue))], columns, 2, 16)
    groups += wrap(" ".join(short), columns, "  also: ")
    keys = [_heading("keys used most", "all: --help all", columns)]
    for found in _rows_of(COMMON_KEYS, catalogue):
        about, at = COMMON_KEYS[found.key], min(26, columns // 2)
        keys += _key_lines(found.key, about, found.default_words, at, columns)
    return [
        head,
        lines,
        [paint("examples", "bold"), *(f"  {x}".replace("PROGRAM", program()) for x in _EXAMPLES)],
        groups,
        keys,
        wrap(_TAIL, columns),
    ]


def _heading(text: str, more: str, columns: int) -> str:
    space = columns - len(text) - len(more)
    return f"{paint(text, 'bold')}{' ' * max(space, 2)}{more}" if space > 1 else paint(text, "bold")


def _rows_of(keys: Iterable[str], catalogue: Catalogue) -> list[KeyRow]:
    """Return the rows of keys, with the default options of their groups."""
    sections = dict.fromkeys(key.rpartition(".")[0] for key in keys)
    each = [key_rows(s, catalogue.defaults.get(s, ""), catalogue) for s in sections]
    found = {known.key: known for rows in each for known in rows}
    return [found[key] for key in keys]


def _few_options(group: str, catalogue: Catalogue) -> str:
    options, files = _ordered(group, catalogue), catalogue.options[group]
    common = GROUPS.get(group, ("", ""))[1]
    shown = [name for name in common.split() or options if name in options]
    # Always show the user's own options.
    shown += [o for o in options if not files[o].is_relative_to(catalogue.folders[0])]
    shown = list(dict.fromkeys(shown))
    more = f" +{len(options) - len(shown)}" if len(options) > len(shown) else ""
    return ", ".join(shown) + more


def _ordered(group: str, catalogue: Catalogue) -> list[str]:
    """Return the options of a group, the default first."""
    default = catalogue.defaults.get(group)
    return sorted(catalogue.options[group], key=lambda name: (name != default, name))


def _topic_page(topic: str, catalogue: Catalogue, columns: int) -> list[list[str]]:
    """Return the page of a section or an option. ConfigError if there is none."""
    names = [*catalogue.options, *(s for s in catalogue.sections if s not in catalogue.options)]
    path, _, option = topic.partition("=")
    section = path.partition(".")[0] if path in catalogue.keys or catalogue.is_entry(path) else path
    if section not in names:
        near = suggest_match(section, names) or nearest_key(topic, catalogue) or names[0]
        why = f"is not a group. Groups: {', '.join(names)}"
        page = near if near.partition(".")[0] in names else ALL  # `seed` is in no section
        raise ConfigError(Problem("--help", topic, why, Fix("--help", page), "unknown_group"))
    options = catalogue.options.get(section, {})
    if not option:
        return _section(section, catalogue, columns)
    if option == ALL:
        each = _ordered(section, catalogue) if options else [""]
        return [block for name in each for block in _option(section, name, catalogue, columns)]
    if option not in options:
        near = suggest_match(option, options) or ALL
        why = f"is not an option of {section}"
        why += f". Options: {list_closest(option, options, section)}" if options else ""
        fix = Fix("--help", f"{section}={near}" if options else section)
        raise ConfigError(Problem("--help", topic, why, fix, "unknown_option"))
    return _option(section, option, catalogue, columns)


def _option(section: str, option: str, catalogue: Catalogue, columns: int) -> list[list[str]]:
    name = f"{section}={option}" if option else section
    about = option_summaries(section, catalogue).get(option, "")
    heading = wrap(about, columns, f"{paint(name, 'bold')}  ", "  ")
    has_keys = section in (*catalogue.sections, *ENTRIES)
    rows = key_rows(section, option, catalogue) if has_keys else []
    return [heading, _table(rows, columns)] if rows else [heading]


def _section(section: str, catalogue: Catalogue, columns: int) -> list[list[str]]:
    """Return the page of a section: options, keys of the default option, and other keys."""
    classes, options = catalogue.sections.get(section, ()), catalogue.options.get(section, {})
    described = section in GROUPS or not classes or not section
    about = title(section) if described else f"{section}: {summary(classes[0])}"
    name, _, about = (about if section else "keys without group: ").partition(": ")
    blocks = [wrap(about, columns, f"{paint(name, 'bold')}: ") if about else [paint(name, "bold")]]
    default = catalogue.defaults.get(section, "")
    if options:
        summaries = option_summaries(section, catalogue)
        at = min(max(map(len, options)) + 4, columns // 2)
        each = [(paint(option, "green") if option == default else option, summaries[option])
                for option in _ordered(section, catalogue)]  # fmt: skip
        heading = f"options (default: {default})" if default else "options"
        blocks.append([paint(heading, "bold"), *fields(each, columns, 2, at)])
    if not classes and section and section not in ENTRIES:
        return blocks
    if rows := key_rows(section, default, catalogue):
        blocks.append([paint(f"keys of {default}" if options else "keys", "bold"),
                       *_table(rows, columns)])  # fmt: skip
    if others := _other_keys(section, default, catalogue, columns):
        blocks += others
        more = f"--help {section}=OPTION (all keys of one option), --help {section}={ALL}"
        blocks.append(wrap(more, columns, "more: "))
    return blocks


def _other_keys(section: str, default: str, catalogue: Catalogue, columns: int) -> list[list[str]]:
    """Return blocks of the keys that the default option lacks, by the options that have them."""
    known = {found.key for found in key_rows(section, default, catalogue)}
    having: dict[str, dict[str, KeyRow]] = {}
    for option in catalogue.options.get(section, {}):
        for found in key_rows(section, option, catalogue):
            if found.key not in known:
                having.setdefault(found.key, {})[option] = found
    blocks: dict[tuple[str, ...], list[KeyRow]] = {}
    for each in having.values():
        by_default: dict[str, list[str]] = {}
        for option, found in each.items():
            by_default.setdefault(found.shown_default, []).append(option)
        defaults = [f"{value} ({', '.join(names)})" for value, names in by_default.items()]
        shown = next(iter(each.values()))
        if len(defaults) > 1:
            shown = KeyRow(shown.key, shown.type, shown.limits, ", ".join(defaults), "",
                           shown.about)  # fmt: skip
        blocks.setdefault(tuple(each), []).append(shown)
    return [
        [*wrap(", ".join(options), columns, f"{paint('keys of', 'bold')} ", "  "),
         *_table(rows, columns)]
        for options, rows in blocks.items()
    ]  # fmt: skip


def _table(rows: list[KeyRow], columns: int) -> list[str]:
    at = min(max(len(found.key) for found in rows) + 4, 30, columns // 2)
    lines = []
    for found in rows:
        facts = ", ".join(filter(None, [found.type, found.limits, found.default_words]))
        lines += _key_lines(found.key, found.about, facts, at, columns)
    return lines


def _key_lines(key: str, about: str, facts: str, at: int, columns: int) -> list[str]:
    """Return a key, its description, and dim facts: right-aligned if they fit, else below."""
    lines = fields([(paint(key, "cyan"), about)], columns, 2, at)
    space = columns - len(plain(lines[-1])) - len(facts)
    if space > 1 and len(lines) == 1:
        return [f"{lines[0]}{' ' * space}{paint(facts, 'dim')}"]
    below = wrap(facts, columns, " " * at)
    return [*lines, *(" " * at + paint(line[at:], "dim") for line in below)]
