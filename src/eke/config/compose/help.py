"""Generate the pages of `python train.py --help` and `--help GROUP` from `conf/` and schema."""

import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.paths import program
from eke.config.compose.catalogue import (
    GROUPS,
    Catalogue,
    class_fields,
    make_catalogue,
    option_summaries,
    suggest_match,
    title,
)
from eke.config.compose.suggest import nearest_key
from eke.config.schema import Config
from eke.config.schema.fields import field_docs, summary

PARTS: Mapping[str, tuple[str, ...]] = {
    "training": ("model", "task", "data", "batch"),
    "techniques": (
        "precision", "optimizer", "schedule", "memory", "attention", "compile", "kernels",
        "distributed", "offload", "dataloader", "peft", "engine",
    ),
    "device and tracker": ("hardware", "tracker"),
    "presets": ("recipe", "experiment", "sweep"),
}  # fmt: skip
"""Heading of the first page -> groups. Other groups belong to a launcher and come last."""

COMMON_KEYS = (
    "train.steps", "batch.per_device", "batch.accumulation", "optimizer.lr", "data.seq_len",
    "train.eval_every", "train.checkpoint_every", "seed", "plan_only", "rerun", "paths.runs",
)  # fmt: skip
"""Keys on the first page."""

_WIDTH = 100
_HEAD = """\
eke finds, runs and compares training recipes that use the available GPUs efficiently.

usage: PROGRAM [group=option ...] [key=value ...]         one run
       PROGRAM -m [group=option,option] [key=value,...]   a sweep: every combination
       PROGRAM --help GROUP                               all options and keys of a group
"""
_TAIL = """
other keys: --help train, --help launcher, --help resources. All values: --cfg job
flags: -m, --config-dir FOLDER (folder with own options), --cell, --version, --hydra-help

  PROGRAM precision=bf16 optimizer=adafactor
  PROGRAM -m precision=fp32,bf16,fp16 seed=0,1
  PROGRAM experiment=smoke hardware=cpu
  PROGRAM recipe=low_memory model=llama_1b plan_only=true"""


def help_text(config_dir: Path | None = None, topic: str = "") -> str:
    """Return the help page of a group, section or key, or the first page without `topic`."""
    catalogue = make_catalogue(config_dir)
    page = _topic_page(topic, catalogue) if topic else _first_page(catalogue)
    return page.replace("PROGRAM", program())


def _first_page(catalogue: Catalogue) -> str:
    lines = [_HEAD]
    listed = {group for groups in PARTS.values() for group in groups}
    others = tuple(group for group in catalogue.options if group not in listed)
    heading = "   (option: the first is the default)"
    for part, groups in {**PARTS, "launchers": others}.items():
        found = [_first_page_row(group, catalogue) for group in groups]
        lines += [f"{part}{heading}", *found] if found else []
        heading = ""
    lines.append("common keys")
    for key in COMMON_KEYS:
        clause = _first_sentence(_doc(key, catalogue)).partition(";")[0].removesuffix(".")
        lines.append(f"  {key:<24}{clause}.")
    return "\n".join([*lines, _TAIL])


def _first_page_row(group: str, catalogue: Catalogue) -> str:
    options, files = _ordered(group, catalogue), catalogue.options[group]
    about, common = GROUPS.get(group, ("", ""))
    shown = [name for name in common.split() or options if name in options]
    # Always show the user's own options.
    shown += [o for o in options if not files[o].is_relative_to(catalogue.folders[0])]
    shown = list(dict.fromkeys(shown))
    more = [f"(+{len(options) - len(shown)})"] if len(options) > len(shown) else []
    return _wrapped(f"  {group:<13}{about:<29}", " ".join([*shown, *more]))


def _ordered(group: str, catalogue: Catalogue) -> list[str]:
    """Return the options of a group, the default first."""
    default = catalogue.defaults.get(group)
    return sorted(catalogue.options[group], key=lambda name: (name != default, name))


def _topic_page(topic: str, catalogue: Catalogue) -> str:
    """Return the page of one section. ConfigError if there is none."""
    names = [*catalogue.options, *(s for s in catalogue.sections if s not in catalogue.options)]
    section = topic.partition(".")[0] if topic in catalogue.keys else topic
    if section not in names:
        near = suggest_match(section, names) or nearest_key(topic, catalogue) or names[0]
        why = f"is not a group. Groups: {', '.join(names)}"
        pages = [near] if near.partition(".")[0] in names else []  # `seed` is in no section
        raise ConfigError(Problem("--help", topic, why, Fix("--help", *pages), "unknown_group"))
    classes = catalogue.sections.get(section, ())
    in_table = section in GROUPS or not classes
    blocks = [title(section) if in_table else f"{section}: {summary(classes[0])}"]
    if section in catalogue.options:
        blocks.append(_option_rows(section, catalogue))
    if classes:
        blocks += _key_rows(section, catalogue)
    return "\n\n".join(blocks)


def _option_rows(group: str, catalogue: Catalogue) -> str:
    names = _ordered(group, catalogue)
    default = catalogue.defaults.get(group)
    width = max(map(len, names)) + 4
    about = option_summaries(group, catalogue)
    rows = [_wrapped(f"  {name:<{width - 2}}", about[name]) for name in names]
    return "\n".join([f"options (default: {default})" if default else "options", *rows])


def _key_rows(section: str, catalogue: Catalogue) -> list[str]:
    """Return the rows of a section's keys: first of all options, then of some."""
    options = catalogue.options.get(section, {})
    fields = {o: {n for n, _ in class_fields(catalogue.schema_class(section, o))} for o in options}
    blocks: dict[tuple[str, ...], list[tuple[str, str]]] = {tuple(options): []}
    for name in catalogue.names(section):
        key = f"{section}.{name}"
        about = _doc(key, catalogue)
        if not about.startswith("Filled in"):  # not set by users
            having = tuple(option for option in options if name in fields[option])
            row = (key, f"{about} ({catalogue.keys[key].words()})")
            blocks.setdefault(having, []).append(row)
    width = max((len(key) for rows in blocks.values() for key, _ in rows), default=0) + 2
    found = []
    for having, rows in blocks.items():
        heading = "keys" if having == tuple(options) else f"keys of {', '.join(having)}"
        lines = [_wrapped(f"  {key:<{width}}", about) for key, about in rows]
        found += ["\n".join([_wrapped("", heading), *lines])] if lines else []
    return found


def _doc(key: str, catalogue: Catalogue) -> str:
    """Return the schema's description of a key, from the first class that has it."""
    section, _, name = key.rpartition(".")
    classes: Iterable[type] = catalogue.sections[section] if section else (Config,)
    return next((docs[name] for docs in map(field_docs, classes) if name in docs), "")


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[^.])\. ", text)[0].removesuffix(".") + "."


def _wrapped(margin: str, text: str) -> str:
    """Wrap text with a prefix on the first line and equal indentation on the others."""
    return textwrap.fill(
        text, _WIDTH, initial_indent=margin, subsequent_indent=" " * len(margin),
        break_long_words=False, break_on_hyphens=False,
    ).rstrip()  # fmt: skip
