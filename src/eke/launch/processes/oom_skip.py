"""Which runs can only need more memory than one that ran out of it.

An order that holds whatever the model, as a forecast's does not: the same run with a
larger micro-batch, longer samples, more layers, without checkpointing, or with float32 in place of
16-bit weights needs no less. Anything else that differs (another optimizer, another attention
kernel) leaves two runs without an order; so does autocast, which adds 16-bit copies of the weights.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from eke.config.schema import Checkpointing, Config
from eke.launch.processes.sweep_job import Job
from eke.plan.planner import Plan

GROWING = (
    "batch.per_device",
    "data.seq_len",
    "model.num_hidden_layers",
    "model.vocab_size",
)
"""Keys with which memory can only grow."""

FREE = ("seed", "repeat", "optimizer.lr", "optimizer.weight_decay", "train.steps", "train.epochs")
"""Keys that make no difference to memory."""


def smallest_first(jobs: Sequence[Job], risk: Callable[[Plan], int | None]) -> list[Job]:
    """Jobs in an order in which one that runs out of memory leaves out as many as it can.

    Those of the first round that may run out of it go by what they are expected to need, in the
    places that they had; all others stay where they are.

    Args:
        jobs: of a sweep, as they were typed.
        risk: bytes that a plan is expected to need, if it may run out of memory; else None.
    """
    found: dict[int, int] = {}
    first = min((job.plan.config.repeat for job in jobs), default=0)
    for place, job in enumerate(jobs):
        if job.plan.config.repeat == first and (size := risk(job.plan)) is not None:
            found[place] = size
    ordered = list(jobs)
    for place, taken in zip(found, sorted(found, key=lambda place: found[place]), strict=True):
        ordered[place] = jobs[taken]
    return ordered


def needs_at_least(plan: Plan, failed: Plan) -> str:
    """Why a plan needs no less memory than one that ran out of it; empty where that is unknown."""
    if plan.device != failed.device or plan.batch.world_size != failed.batch.world_size:
        return ""
    if plan.batch.accumulation == 1 < failed.batch.accumulation:
        return ""  # gradients were there while the second micro-batch went through the model
    widened = _is_wider(plan, failed)
    here, there = _flat(plan), _flat(failed)
    differing = [key for key in {*here, *there} if here.get(key) != there.get(key)]
    more = []
    for key in sorted(differing):
        if key in FREE or (widened and key.startswith("precision.")):
            continue
        if not _grows(key, there.get(key), here.get(key)):
            return ""
        more.append(f"{key}={here[key]} needs no less than {there[key]}")
    more += [f"float32 needs no less than {failed.compute.weights}"] if widened else []
    return "; ".join(more) or "this run differs in nothing that changes memory"


def _grows(key: str, failed: Any, here: Any) -> bool:
    if key in GROWING:
        return isinstance(here, int) and isinstance(failed, int) and here > failed
    if key == "memory.checkpointing":
        return bool(here is Checkpointing.off and failed is Checkpointing.full)
    return False


def _is_wider(plan: Plan, failed: Plan) -> bool:
    """Whether all that is 16 bits wide in the run that failed is 32 bits wide in the other."""
    narrow, wide = failed.compute, plan.compute
    return (
        narrow.weights != "float32"
        and not narrow.master
        and narrow.float8 == wide.float8 == "off"
        and wide.weights == "float32"
        and wide.autocast is None
    )


def _flat(plan: Plan) -> dict[str, Any]:
    """Key path -> value, as resolved, without what surrounds the run."""
    pairs = [pair for pair in _walk(plan.config) if not pair[0].startswith(_AROUND)]
    found = {key: value for key, value in pairs if not key.endswith(".option")}
    found["batch.per_device"] = plan.batch.per_device
    for resolved in ("batch.accumulation", "batch.target", "batch.eval_per_device"):
        found.pop(resolved, None)  # looked at above
    found["model"] = type(plan.config.model).__name__
    return found


_AROUND = (
    "tracker.", "paths.", "hardware.", "rerun", "plan_only", "ignore_forecast", "launcher.",
    "train.log_every",
)  # fmt: skip
"""Starts of keys of what surrounds a run."""


def _walk(node: Config | Any, path: str = "") -> list[tuple[str, Any]]:
    if not dataclasses.is_dataclass(node):
        return [(path, node)]
    pairs = []
    for field in dataclasses.fields(node):
        below = f"{path}.{field.name}" if path else field.name
        pairs += _walk(getattr(node, field.name), below)
    return pairs
