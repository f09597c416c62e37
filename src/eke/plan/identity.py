"""Identity: which runs are the same run, and which machines the same machine.

`run_id` names the run folder, its checkpoints and its W&B run. It covers everything that can change
the result or its speed, as resolved, and nothing that only changes where it is shown.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from eke.config.schema import LAUNCH_GROUPS, SCHEMA_VERSION

PRESENTATION = (
    *LAUNCH_GROUPS, "tracker", "paths", "hardware", "sweep", "recipe", "rerun",
    "plan_only", "ignore_forecast",
)  # fmt: skip
"""Groups and root keys that change neither the result nor what is measured."""

PRESENTATION_KEYS = {
    "data": ("max_row_bytes",),
    "train": (
        "log_every",
        "checkpoint_every",
        "checkpoint_async",
        "keep_checkpoints",
        "save_final",
        "save_on_signal",
        "resume",
    ),
    "distributed": ("timeout_s",),
    "offload": ("path",),
}  # fmt: skip
"""The same for keys of other groups: no timing includes checkpoints,
and a limit of rows changes none that is read."""

FORMER_VALUES: dict[str, Any] = {
    "peft.base_weights": None, "model.freeze": [], "model.num_frozen_parameters": None,
    "train.early_stop_patience": None, "train.keep_best": None, "task.problem": "single",
    "data.text_pair": None, "data.streaming": False, "data.shuffle_buffer": 1000,
    "precision.casts": "per_use", "peft.fused": False, "task.labels": [], "data.multi_hot": None,
    "task.router_loss": None, "model.router_loss": None, "peft.experts": False,
    "distributed.replicas": 1,
}  # fmt: skip
"""Key path -> value at which a key that was added later changes nothing. At that value the key is
not part of the identity, so that runs and sweeps from before it keep their names. Frozen weights
had the format of all weights: None in the plan's answers."""

NUMERICS_VERSION = 3
"""Raise it when the same configuration and data would be trained by other mathematics: no run is
then continued from a checkpoint of the old ones, nor answered from their records."""


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces: one text for one meaning."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def meaningful(config: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved configuration without presentation keys."""
    kept = {key: value for key, value in config.items() if key not in PRESENTATION}
    for group, keys in PRESENTATION_KEYS.items():
        kept[group] = {key: value for key, value in kept[group].items() if key not in keys}
    return kept


def run_id(config: Mapping[str, Any], resolved: Mapping[str, Any], data_fingerprint: str) -> str:
    """16 hex digits of SHA-256 of the configuration as plain values, and the data's content.

    `resolved` has the plan's answers to what the configuration leaves open, by key path; they
    replace the open values, so that an override with the answer makes no other run.
    """
    kept = meaningful(config)
    for path, value in resolved.items():
        *groups, key = path.split(".")
        node = kept
        for group in groups:
            node[group] = dict(node[group])
            node = node[group]
        node[key] = value
    for path, former in FORMER_VALUES.items():
        group, key = path.split(".")
        if key in kept[group] and kept[group][key] == former:
            kept[group] = {name: value for name, value in kept[group].items() if name != key}
    versions = {"schema": SCHEMA_VERSION, "numerics": NUMERICS_VERSION}
    content = {**versions, "config": kept, "data": data_fingerprint}
    return hashlib.sha256(canonical(content).encode()).hexdigest()[:16]


def changed_fingerprint(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Differences between two machine fingerprints, formatted; empty when they are the same."""
    return [
        f"{key}: {before.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
