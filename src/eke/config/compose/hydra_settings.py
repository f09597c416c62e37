"""Hydra's own settings, which it reads only in sweeps of its own, and values of its sweeps."""

import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import (
    ChoiceSweep,
    Glob,
    IntervalSweep,
    Override,
    RangeSweep,
    Sweep,
    Transformer,
)

from eke.common.errors import Fix, Problem
from eke.config.compose.catalogue import Catalogue, shown

MAX_CHECKED = 100
"""Maximum number of sweep values that are checked."""

LAUNCHING = ("hydra/launcher", "hydra/sweeper")
"""Hydra's groups that configure how the runs of a sweep start."""

_INSTEAD = {
    "hydra.sweeper.params": Fix(remark="sweep.product={KEY:[VALUE,VALUE]}"),
    "hydra.job.env_set": Fix(remark="export NAME=VALUE   (before the command; runs inherit it)"),
}
"""Setting or its section -> eke's equivalent."""


def is_launching(text: str) -> bool:
    """Whether an override configures how runs start, which runs do not need."""
    by_group = text.startswith(tuple(f"{group}=" for group in LAUNCHING))
    return by_group or text.startswith(("hydra.launcher.", "hydra.sweeper.", "hydra.mode=MULTIRUN"))


def is_hydras(key: str) -> bool:
    """Whether a key or group is Hydra's, not eke's."""
    return bool(re.match(r"hydra[./]|hydra$", key))


def check_setting(parsed: Override, raw: str) -> list[Problem]:
    """Explain why a Hydra setting is invalid in a run started by eke."""
    key, text = parsed.key_or_group, parsed.input_line or ""
    if re.match(r"hydra[./](launcher|sweeper)\b", key) or text == "hydra.mode=MULTIRUN":
        why = "takes effect in a sweep only; without -m one run would start here"
        typed = [] if key == "hydra.mode" else [text]
        return [Problem(key, shown(raw), why, Fix("-m", *typed))]
    if key == "hydra.searchpath":
        why = "your own options are found in a folder named by a flag"
        return [Problem(key, shown(raw), why, Fix(remark="--config-dir FOLDER"))]
    fix = _in_place_of(key, raw)
    return [Problem(key, shown(raw), NO_EFFECT if fix else f"{NO_EFFECT}; remove it", fix)]


NO_EFFECT = "is Hydra's own and has no effect: Hydra composes, and eke starts the runs"


def _in_place_of(path: str, raw: str) -> Fix:
    """Eke's equivalent setting; empty if there is none."""
    if path in ("hydra.run.dir", "hydra.sweep.dir"):
        return Fix(f"paths.runs={'FOLDER' if '$' in raw else raw}")
    return next((fix for key, fix in _INSTEAD.items() if f"{path}.".startswith(f"{key}.")), Fix())


def explain_in_file(path: str, files: Sequence[Path], raw: str = "") -> Problem:
    """Explain a Hydra setting, by its key path and its value, if known, with its line in a file."""
    name = re.escape(re.split(r"[./]", path)[-1])
    value = re.escape(raw) or ".*?"
    wanted = re.compile(rf"(?:^|[\s/{{,]){name}\s*:\s*[\"']?({value})[\"']?\s*(?:,\s|\}}|#|$)")
    texts = [(file, file.read_text(errors="replace")) for file in files]
    about_hydra = [(file, text.splitlines()) for file, text in texts if "hydra" in text]
    lines = [(f, n, line) for f, text in about_hydra for n, line in enumerate(text, start=1)]
    hits = ((f"{f}:{n}", hit[1].strip()) for f, n, line in lines if (hit := wanted.search(line)))
    where, value = next(hits, (path, raw))
    instead = _in_place_of(path, value)
    remark = "and delete this line" if instead.words else "delete this line"
    if instead.remark:
        remark += f", and type {instead.remark}"
    return Problem(where, f"{path}: {shown(value)}", NO_EFFECT, Fix(*instead.words, remark=remark))


def sweep_values(parsed: Override, catalogue: Catalogue) -> Iterator[str]:
    """Texts of a sweep's values, also inside lists; an interval has none until it is sampled."""
    for part in sweep_parts(parsed.value()):
        if isinstance(part, Glob):
            found = part.filter(list(catalogue.options.get(parsed.key_or_group, {})))
            if not found:
                raise ValueError(part)
            yield from found
        elif isinstance(part, RangeSweep):
            if not math.isfinite((part.stop or 0) - (part.start or 0)):
                raise ValueError(part)
            yield from map(Transformer.str, _in_order(part.range(), part.shuffle))
        elif not isinstance(part, IntervalSweep):
            yield Transformer.str(part)


def why_unlisted(parsed: Override, catalogue: Catalogue) -> str:
    """Why no run can have a value that Hydra's grammar takes; empty if one can."""
    value = parsed.value()
    if isinstance(value, dict | list) and _holds_sweep(value):
        return "a sweep inside a list or mapping is a quoted text"
    if not parsed.is_sweep_override() or IntervalSweep in map(type, sweep_parts(value)):
        return ""
    with suppress(Exception):  # Hydra's, ValueError, those of decimal
        if list(islice(sweep_values(parsed, catalogue), MAX_CHECKED)):
            return ""
    return "has no values: a range is finite, with a step other than 0, and a glob matches options"


def _holds_sweep(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, Sweep | Glob) or any(map(_holds_sweep, inner))


def sweep_parts(value: Any) -> Iterator[Any]:
    """Parts of a sweep, also inside lists: single values, ranges, globs, intervals."""
    if not isinstance(value, ChoiceSweep):
        yield value
        return
    for item in _in_order(value.list, value.shuffle):
        yield from sweep_parts(item)


def _in_order(items: Iterable[Any], shuffled: bool) -> Iterable[Any]:
    """Shuffle with a fixed order, so that the sweep is reproducible."""
    found = list(items) if shuffled else []
    random.Random(0).shuffle(found)
    return found or items
