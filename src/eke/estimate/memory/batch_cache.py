"""What batch=auto has learnt and decided, on disk: probes, and what runs were started with.

A choice is kept so that the same command stays the same run: formulas, traces and probes may each
come to another one.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import cattrs

from eke.common.files import own_folder, read_json, write_atomic
from eke.config.schema.codec import make_converter
from eke.data.sources import cache_folder
from eke.estimate.memory import cache
from eke.plan.planner import Plan

FORMAT = 1
"""Raise it when what is kept changes its meaning."""


@dataclass(frozen=True)
class Seen:
    """Micro-batches of one configuration on one device."""

    fits: int = 0
    """The largest that a probe ran with; 0 where none did."""
    fails: int | None = None
    """The smallest that a probe ran out of memory with."""
    chosen: dict[str, int] = field(default_factory=dict)
    """Samples per optimizer step -> the micro-batch that runs were started with."""


def key_of(plan: Plan, capacity: int) -> str:
    """32 hex digits: the same for plans that differ in nothing but how their steps are cut.

    Args:
        plan: with any micro-batch.
        capacity: bytes that the run can have.
    """
    batch, asked = plan.batch, plan.config.batch.eval_per_device
    content = cache.what_counts(plan) | {
        "seen": FORMAT,
        "batch": [batch.world_size, batch.devices, asked],
        "capacity": capacity,
        "machine": plan.machine,
    }
    return cache.digest_of(content)


def find(key: str) -> Seen:
    """What is kept under a key; nothing where that cannot be read."""
    try:
        return make_converter().structure(read_json(_path(key)), Seen)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, cattrs.BaseValidationError):
        return Seen()


def note_probe(key: str, size: int, fits: bool) -> Seen:
    """Keep how a probe ended; what contradicts it is older, and forgotten."""
    seen = find(key)
    if fits:
        fails = seen.fails if seen.fails is None or seen.fails > size else None
        return _keep(key, replace(seen, fits=max(seen.fits, size), fails=fails))
    fails = min(size, seen.fails or size)
    return _keep(key, replace(seen, fits=seen.fits if seen.fits < size else 0, fails=fails))


def note_choice(key: str, target: int, size: int) -> None:
    """Keep what a run is started with."""
    seen = find(key)
    if seen.chosen.get(str(target)) != size:
        _keep(key, replace(seen, chosen={**seen.chosen, str(target): size}))


def _keep(key: str, seen: Seen) -> Seen:
    """What cannot be written is found again another time."""
    path = _path(key)
    try:
        own_folder(path.parent)
        write_atomic(path, json.dumps(make_converter().unstructure(seen)))
    except OSError:
        pass
    return seen


def _path(key: str) -> Path:
    return cache_folder() / "batches" / f"{key}.json"
