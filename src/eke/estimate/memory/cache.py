"""Traces on disk: what was found for one configuration and one set of library versions."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

import cattrs

from eke.common.files import own_folder, read_json, write_atomic
from eke.config.schema.codec import make_converter
from eke.data.sources import cache_folder
from eke.estimate.memory.values import Traced
from eke.hardware.fingerprint import LIBRARIES, installed_versions, package_folder, source_hash
from eke.models.sizes import is_ragged
from eke.plan.identity import PRESENTATION, canonical
from eke.plan.planner import Plan, drawn, evaluated
from eke.plan.planner.store import plan_to_plain

FORMAT = 3
"""Raise it when what is kept changes its meaning."""

SOURCES = ("build", "memory", "plan", "schema", "sizes")
"""Packages of eke that decide what a trace sees."""

NO_MEMORY: Mapping[str, tuple[str, ...] | None] = {
    **dict.fromkeys(PRESENTATION),
    "seed": None,
    "repeat": None,
    "schedule": None,
    "dataloader": None,
    "engine": None,
    "batch": None,  # as planned: in the plan's own part, and by the rows that there are
    "train": (
        "steps", "epochs", "eval_every", "log_every", "checkpoint_every", "keep_checkpoints",
        "save_final", "timing_warmup_steps", "stop_on_nonfinite",
    ),
    "optimizer": (
        "lr", "weight_decay", "beta1", "beta2", "eps", "eps1", "clip_threshold", "decay_rate",
        "adamw_lr", "average_power", "lr_power", "scale",
    ),
    "data": (
        "data_seed", "num_samples", "num_eval_samples", "eval_frac", "min_token", "max_token",
        "path", "pattern", "eval_path", "name", "revision", "streaming", "max_bad_frac",
        "max_row_bytes",
        "seq_len", "lengths", "tokenizer", "min_len", "median_len", "sigma", "length_grouping",
    ),
    "distributed": ("timeout_s", "p2p"),
    "peft": ("save_merged", "alpha"),
    "precision": ("tf32",),
}  # fmt: skip
"""Keys that no trace depends on: None for a whole group. Any other key counts, a new one too."""


def key_of(plan: Plan) -> str:
    """32 hex digits: the same for plans that one trace answers."""
    return digest_of(what_counts(plan))


def digest_of(content: Mapping[str, Any]) -> str:
    """32 hex digits."""
    return hashlib.sha256(canonical(content).encode()).hexdigest()[:32]


def what_counts(plan: Plan) -> dict[str, Any]:
    """All of a plan that its memory depends on, as JSON values."""
    plain = plan_to_plain(plan)
    config = {
        group: _counting(value, NO_MEMORY.get(group, ()))
        for group, value in plain["config"].items()
        if NO_MEMORY.get(group, ()) is not None
    }
    return {
        "format": FORMAT,
        "config": config,
        "engine": plan.config.engine.option,
        "batch": {**plain["batch"], "per_device": None, "eval_per_device": None},
        "rows": [astuple(each) for each in (drawn(plan).expected, evaluated(plan))],
        "ragged": is_ragged(plan.config),
        "compute": {**plain["compute"], "tf32": None, "pin_memory": None},
        "device": _device(plan),
        "deepspeed": plain["deepspeed"] is not None,
        "software": _software(),
    }


def _counting(value: Any, left_out: tuple[str, ...] | None) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: part for key, part in value.items() if key not in (left_out or ())}


def _device(plan: Plan) -> list[Any]:
    """Of a GPU its generation; of a CPU what its kernels size their scratch memory by."""
    device = plan.device
    if device.kind != "cpu":
        return [device.kind, device.capability]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [device.kind, device.name, cores, os.environ.get("OMP_NUM_THREADS", "")]


@cache
def _software() -> dict[str, str]:
    package = package_folder()
    hashes = {name: source_hash(package / name) for name in SOURCES}
    return {**hashes, **installed_versions(LIBRARIES)}


def find(key: str) -> Traced | None:
    """What is kept under a key; None when nothing readable is."""
    try:
        return make_converter().structure(read_json(_path(key)), Traced)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, cattrs.BaseValidationError):
        return None


def keep(key: str, traced: Traced) -> None:
    """Keep it; one that cannot be written is found again another time."""
    path = _path(key)
    try:
        own_folder(path.parent)
        write_atomic(path, json.dumps(make_converter().unstructure(traced)))  # phases in order
    except OSError:
        return


def _path(key: str) -> Path:
    return cache_folder() / "traces" / f"{key}.json"
