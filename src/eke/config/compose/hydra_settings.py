"""Hydra's settings, which only Hydra's own sweeps read, and values of its sweeps."""

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

LAUNCHING = ("hydra/launcher", "hydra/sweeper")
"""Hydra's groups that configure how the runs of a sweep start."""

_INSTEAD = {
    "hydra.sweeper.params": Fix(remark="sweep.product={KEY:[VALUE,VALUE]}"),
    "hydra.job.env_set": Fix(remark="export NAME=VALUE   (before the command)"),
}
"""Setting or section of Hydra -> equivalent in eke."""


def is_launching(text: str) -> bool:
    """Return whether an override configures the start of runs."""
    by_group = text.startswith(tuple(f"{group}=" for group in LAUNCHING))
    return by_group or text.startswith(("hydra.launcher.", "hydra.sweeper.", "hydra.mode=MULTIRUN"))


def is_hydras(key: str) -> bool:
    """Return whether a key or group belongs to Hydra."""
    return bool(re.match(r"hydra[./]|hydra$", key))


def check_setting(parsed: Override, raw: str) -> list[Problem]:
    """Return the problem of a Hydra setting in a run started by eke."""
    key, text = parsed.key_or_group, parsed.input_line or ""
    if re.match(r"hydra[./](launcher|sweeper)\b", key) or text == "hydra.mode=MULTIRUN":
        typed = [] if key == "hydra.mode" else [text]
        why = "is for sweeps and needs -m"
        return [Problem(key, shown(raw), why, Fix("-m", *typed), "needs_sweep")]
    if key == "hydra.searchpath":
        why, fix = "own options need --config-dir", Fix(remark="--config-dir FOLDER")
        return [Problem(key, shown(raw), why, fix, "hydra_setting")]
    fix = _equivalent_fix(key, raw)
    why = _NO_EFFECT if fix else f"{_NO_EFFECT}. Remove it"
    return [Problem(key, shown(raw), why, fix, "hydra_setting")]


_NO_EFFECT = "is a setting of Hydra without effect here: eke starts the runs"


def _equivalent_fix(path: str, raw: str) -> Fix:
    """Return eke's equivalent of a setting, an empty fix if there is none."""
    if path in ("hydra.run.dir", "hydra.sweep.dir"):
        return Fix(f"paths.runs={'FOLDER' if '$' in raw else raw}")
    return next((fix for key, fix in _INSTEAD.items() if f"{path}.".startswith(f"{key}.")), Fix())


def explain_in_file(path: str, files: Sequence[Path], raw: str = "") -> Problem:
    """Return the problem of a Hydra setting in a file, with its line."""
    name = re.escape(re.split(r"[./]", path)[-1])
    value = re.escape(raw) or ".*?"
    wanted = re.compile(rf"(?:^|[\s/{{,]){name}\s*:\s*[\"']?({value})[\"']?\s*(?:,\s|\}}|#|$)")
    texts = [(file, file.read_text(errors="replace")) for file in files]
    about_hydra = [(file, text.splitlines()) for file, text in texts if "hydra" in text]
    lines = [(f, n, line) for f, text in about_hydra for n, line in enumerate(text, start=1)]
    hits = ((f"{f}:{n}", hit[1].strip()) for f, n, line in lines if (hit := wanted.search(line)))
    where, value = next(hits, (path, raw))
    instead = _equivalent_fix(path, value)
    remark = "and delete this line" if instead.words else "delete this line"
    if instead.remark:
        remark += f", and use {instead.remark}"
    fix = Fix(*instead.words, remark=remark)
    return Problem(where, f"{path}: {shown(value)}", _NO_EFFECT, fix, "hydra_setting")


def sweep_values(parsed: Override, catalogue: Catalogue) -> Iterator[str]:
    """Yield the values of a sweep as text, also inside lists. An interval yields none."""
    for part in sweep_parts(parsed.value()):
        if isinstance(part, Glob):
            found = part.filter(list(catalogue.options.get(parsed.key_or_group, {})))
            if not found:
                raise ValueError(part)
            yield from found
        elif isinstance(part, RangeSweep):
            if not math.isfinite((part.stop or 0) - (part.start or 0)):
                raise ValueError(part)
            yield from map(Transformer.str, _shuffle_if(part.range(), part.shuffle))
        elif not isinstance(part, IntervalSweep):
            yield Transformer.str(part)


def why_unlisted(parsed: Override, catalogue: Catalogue) -> str:
    """Return why a sweep has no values for runs, "" if it has."""
    value = parsed.value()
    if isinstance(value, dict | list) and _holds_sweep(value):
        return "a sweep inside a list or mapping must be quoted"
    if not parsed.is_sweep_override() or IntervalSweep in map(type, sweep_parts(value)):
        return ""
    with suppress(Exception):  # of Hydra or decimal, or ValueError
        if list(islice(sweep_values(parsed, catalogue), MAX_CHECKED)):
            return ""
    return "has no values. A range needs a finite stop and a step, a glob must match options"


def _holds_sweep(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, Sweep | Glob) or any(map(_holds_sweep, inner))


def sweep_parts(value: Any) -> Iterator[Any]:
    """Yield the parts of a sweep, also inside lists: values, ranges, globs, intervals."""
    if not isinstance(value, ChoiceSweep):
        yield value
        return
    for item in _shuffle_if(value.list, value.shuffle):
        yield from sweep_parts(item)


def _shuffle_if(items: Iterable[Any], shuffled: bool) -> Iterable[Any]:
    """Shuffle with a fixed seed, so that the sweep is reproducible."""
    found = list(items) if shuffled else []
    random.Random(0).shuffle(found)
    return found or items
