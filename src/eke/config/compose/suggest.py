"""Suggest a key or group for an unknown one, and overrides for paths and names."""

import os
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from eke.common.paths import program, user_path
from eke.common.text import list_closest, normalize_name, override
from eke.config.compose.catalogue import (
    FIXED_FIELDS,
    Catalogue,
    class_fields,
    default_text,
    suggest_match,
)
from eke.config.schema import ENDINGS, VARIANTS

NUMBER_KEYS = {
    "batch": "batch.per_device",
    "data": "data.num_samples",
    "dataloader": "dataloader.workers",
    "distributed": "distributed.num_processes",
    "optimizer": "optimizer.lr",
    "schedule": "schedule.warmup_steps",
    "train": "train.steps",
}
"""Section -> key for a number given to the section: `batch=4` means `batch.per_device=4`."""


def nearest_key(key: str, catalogue: Catalogue) -> str | None:
    """Return the nearest key, section or group for an unknown key."""
    key = key.strip("./").replace("/", ".")
    section, _, name = key.rpartition(".")
    if section:
        return _nearest_nested(section, name, catalogue)
    if _keys_named(name, catalogue):
        return _key_named(name, catalogue)
    roots = [path for path in catalogue.keys if "." not in path]
    if near := suggest_match(name, [*catalogue.options, *catalogue.sections, *roots]):
        return near
    near = suggest_match(name, [path.rpartition(".")[2] for path in typable_keys(catalogue)])
    return _key_named(near, catalogue) if near else None


def _nearest_nested(section: str, name: str, catalogue: Catalogue) -> str | None:
    """Correct the wrong part of `optimizer.momentm`, `optimizr.lr`, `trainer.steps`."""
    if section in catalogue.keys:
        return section
    near_section = suggest_match(section, catalogue.sections)
    if near_section and (near := suggest_match(name, catalogue.names(near_section))):
        return f"{near_section}.{near}"
    if section in catalogue.sections:
        return name if name in catalogue.options else _key_named(name, catalogue)
    return _key_named(name, catalogue) or suggest_match(
        f"{section}.{name}", typable_keys(catalogue)
    )


def _key_named(name: str, catalogue: Catalogue) -> str | None:
    """Return the key whose last part is `name`, if there is exactly one."""
    paths = _keys_named(name, catalogue)
    return paths[0] if len(paths) == 1 else None


def _keys_named(name: str, catalogue: Catalogue) -> list[str]:
    return [k for k in typable_keys(catalogue) if k.rpartition(".")[2] == name]


def list_known_keys(key: str, catalogue: Catalogue) -> str:
    """Return a message for an unknown key without a near match, with the existing keys."""
    section, _, name = key.rpartition(".")
    if several := _keys_named(name, catalogue):
        return f"unknown key. Did you mean {' or '.join(several)}?"
    if section in catalogue.sections:
        keys = list_closest(name, catalogue.names(section), section)
        return f"unknown key. Keys of {section}: {keys}"
    return f"unknown key or group. List: {program()} --help"


def suggest_option(section: str, option: str, others: Sequence[str], catalogue: Catalogue) -> str:
    """Return the option that was probably meant, of `others`, which have the key in question."""

    def rank(other: str) -> tuple[bool, bool, int, bool]:
        # First the default, then a similar name, then the option with the fewest keys.
        num_keys = len(class_fields(catalogue.schema_class(section, other)))
        is_default, is_similar = other == catalogue.defaults.get(section), other.startswith(option)
        return not is_default, not is_similar, num_keys, other not in VARIANTS[section]

    return min(others, key=rank)


def typable_keys(catalogue: Catalogue) -> list[str]:
    """Return all keys but those that only option files set."""
    return [k for k in catalogue.keys if k.rpartition(".")[2] not in FIXED_FIELDS]


def suggest_value_for_key(name: str, catalogue: Catalogue) -> str | None:
    """Return the override for a name without a value, with its default or true for a switch."""
    if name in catalogue.options:
        return f"{name}={catalogue.defaults.get(name, next(iter(catalogue.options[name])))}"
    if name in catalogue.keys:
        field = catalogue.keys[name]
        return f"{name}={'true' if field.kind is bool else default_text(field, name)}"
    if name in catalogue.sections:
        return suggest_value_for_key(f"{name}.{catalogue.names(name)[0]}", catalogue)
    return next(
        (f"{g}={name}" for g, options in catalogue.options.items() if name in options), None
    )


# Extensions of files that no option of `data` can read.
_UNREAD = (".tsv", ".xlsx", ".arrow", ".zip", ".tar", ".npy", ".npz", ".bin", ".pkl", ".pt", ".h5")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def option_for(typed: str) -> str:
    """Return the option of `data` that reads a file or folder, "" if there is none."""
    folder = user_path(typed)
    names = [typed]
    if os.path.exists(folder) and folder.is_dir():
        names = sorted(p.name for p in islice(folder.rglob("*.*"), 1000))  # a time limit
    for option, endings in ENDINGS.items():
        if any(name.lower().endswith(endings) for name in names):
            return option
    return "" if typed.lower().endswith(_UNREAD) else "text"


def suggest_data_overrides(typed: str) -> tuple[str, ...]:
    """Return overrides that train on a file or folder, or on a hub data set of this name."""
    bare = typed.strip("\"'")
    if not _is_file(bare):
        return ("data=hub", f"data.name={typed}")
    option = option_for(bare)
    return (f"data={option}", f"data.path={typed}") if option else ()


def as_evaluation(typed: str) -> tuple[str, ...]:
    """Return overrides that evaluate on a file, if an option supports it."""
    option = option_for(typed.strip("\"'"))
    if option not in ENDINGS:
        return ()
    return (f"data={option}", "data.path=FILE_OR_FOLDER", f"data.eval_path={typed}")


def _is_file(typed: str) -> bool:
    """Return whether a text is a path of a file or folder, not `owner/name` or a word."""
    if os.path.exists(user_path(typed)) or re.match(r"[./~]|[A-Za-z]:\\|.*/$", typed):
        return True
    if re.search(r"\.[A-Za-z]\w{0,7}$|\\|\*|/.*/", typed):
        return True
    return "/" in typed and os.path.exists(user_path(typed.partition("/")[0]))


def suggest_for_path(group: str, text: str) -> tuple[str, ...]:
    """Return overrides for a checkpoint, file or data set given in place of an option."""
    if group == "data":
        return suggest_data_overrides(text)
    bare = text.strip("\"'")
    named = re.search(r"[-\d]", bare) and re.fullmatch(r"[A-Za-z][\w.-]*", bare)
    is_name = named or re.search(r"[/\\]", bare) or os.path.exists(user_path(bare))
    if group != "model" or not is_name:
        return ()
    if bare.lower().endswith(_WEIGHTS):
        text = override("", str(Path(bare).parent))[1:]
    return ("model=pretrained", f"model.name_or_path={text}")


def is_checkpoint(typed: str, near: str) -> bool:
    """Return whether a name is of a hub model: such names have dashes, options do not."""
    if "-" not in typed:
        return False
    # gpt2-xl and t5-small are hub names of the same sizes. tiny-bert exists only in eke.
    return normalize_name(typed) != normalize_name(near) or near.startswith(("gpt2_", "t5_"))


def shares_numbers(group: str, typed: str, option: str) -> bool:
    """Return whether both names have the same numbers: qwen3_4b is no misspelt qwen3_8b."""
    number = r"\d+[a-z]*" if group == "hardware" else r"\d+"
    numbers = re.findall(number, normalize_name(option))
    return set(re.findall(number, normalize_name(typed))) <= set(numbers)
