"""Identity of runs and machines.

`run_id` names the run folder, its checkpoints and its W&B run. It covers all resolved settings that
can change the result or its speed, but no settings of presentation.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from eke.config.schema import LAUNCH_GROUPS, SCHEMA_VERSION

PRESENTATION = (
    *LAUNCH_GROUPS, "tracker", "paths", "hardware", "sweep", "recipe", "rerun",
    "plan_only", "ignore_forecast", "code",
)  # fmt: skip
"""Groups and root keys without effect on result and measurements."""

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
"""Keys of other groups without effect on result and measurements (timings exclude checkpoints)."""

FORMER_VALUES: dict[str, Any] = {
    "peft.base_weights": None, "model.freeze": [], "model.num_frozen_parameters": None,
    "train.early_stop_patience": None, "train.keep_best": None, "task.problem": "single",
    "data.text_pair": None, "data.streaming": False, "data.shuffle_buffer": 1000,
    "precision.casts": "per_use", "peft.fused": False, "task.labels": [], "data.multi_hot": None,
    "task.router_loss": None, "model.router_loss": None, "peft.experts": False,
    "distributed.replicas": 1,
}  # fmt: skip
"""Key path of a key added later -> value without effect, with which the key is not in the identity.
Older runs and sweeps keep their names. `peft.base_weights` None is the format of all weights."""

FORMER_GROUPS: dict[str, Any] = {
    "loss": {"option": "auto", "per": None, "couples_batch": False}, "metrics": {}, "callbacks": {},
}  # fmt: skip
"""Group added later -> content without effect, with which the group is not in the identity."""

_NUMERICS_VERSION = 3
"""Version of the training mathematics. After an increase, older checkpoints are not resumed and
older records not reused."""


def canonical(value: Any) -> str:
    """Serialize to JSON with sorted keys and without spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def meaningful(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without presentation keys."""
    kept = {key: value for key, value in config.items() if key not in PRESENTATION}
    for group, keys in PRESENTATION_KEYS.items():
        kept[group] = {key: value for key, value in kept[group].items() if key not in keys}
    return kept


def run_id(
    config: Mapping[str, Any], resolved: Mapping[str, Any], data_fingerprint: str, code: str = ""
) -> str:
    """Hash the configuration as plain values and the data's content to 16 hex digits.

    `resolved` has the plan's values of open settings by key path, so that an override with the same
    value has the same identity. `code` is the digest of own code, empty without own code.
    """
    kept = meaningful(config)
    for path, value in resolved.items():
        group, key = path.split(".")
        kept[group] = {**kept[group], key: value}
    for path, former in FORMER_VALUES.items():
        group, key = path.split(".")
        if key in kept[group] and kept[group][key] == former:
            kept[group] = {name: value for name, value in kept[group].items() if name != key}
    for group in [group for group, former in FORMER_GROUPS.items() if kept.get(group) == former]:
        del kept[group]
    for group, section in kept.items():  # files and overrides with the same target are one run
        if isinstance(section, dict) and "args" in section:
            kept[group] = {**section, "option": "custom"}
    versions = {"schema": SCHEMA_VERSION, "numerics": _NUMERICS_VERSION}
    content = {**versions, "config": kept, "data": data_fingerprint}
    content |= {"code": code} if code else {}
    return hashlib.sha256(canonical(content).encode()).hexdigest()[:16]


def changed_fingerprint(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Format the differences between two machine fingerprints, [] if they are equal."""
    return [
        f"{key}: {before.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
