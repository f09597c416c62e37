"""Construction of the planned optimizer and learning-rate schedule, and tensors of optimizers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eke.config.schema import CustomSchedule, DecayingSchedule, WSDSchedule
from eke.models.sizes import optimizer_entry
from eke.plan.planner import Plan
from eke.training.custom.build import build_own_schedule
from eke.training.distributed.fsdp import local_tensor
from eke.training.model.number_formats import build_with_master
from eke.training.optimizer.update import Groups, parameter_groups


def build_optimizer(plan: Plan, model: nn.Module) -> Optimizer:
    """Build the planned optimizer of the trainable parameters of an unwrapped model."""
    groups = parameter_groups(model, plan.config.optimizer.weight_decay)
    build: Callable[[Plan, Groups], Optimizer] = resolve_name(
        optimizer_entry(plan.config.optimizer).builder
    )
    if plan.compute.master and plan.deepspeed is None:  # DeepSpeed keeps its own copies
        return build_with_master(groups, partial(build, plan))
    return build(plan, groups)


@contextmanager
def evaluation_weights(optimizer: Optimizer) -> Iterator[list[Tensor]]:
    """Give the model the weights to evaluate, and yield the training weights, [] if equal."""
    # Schedule-Free evaluates the average of its weights, but takes gradients between it and its
    # fast weights. Converting back by formula rounds.
    switch = getattr(optimizer, "eval", None)
    if switch is None:
        yield []
        return
    kept = [p.detach().to("cpu", copy=True) for p in _parameters(optimizer)]
    switch()
    try:
        yield kept
    finally:
        optimizer.train()  # type: ignore[attr-defined]  # schedulefree 1.4
        restore_training_weights(optimizer, kept)


@torch.no_grad()
def restore_training_weights(optimizer: Optimizer, kept: Sequence[Tensor]) -> None:
    """Restore the weights that `evaluation_weights` yielded."""
    if kept:
        for parameter, value in zip(_parameters(optimizer), kept, strict=True):
            local_tensor(parameter).copy_(local_tensor(value))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return all plain tensors of the state except scalars, without shared duplicates."""
    found = {t.untyped_storage().data_ptr(): t for t in plain_tensors(optimizer.state) if t.dim()}
    return list(found.values())


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors inside dicts, lists, attributes of objects and quantised tensors."""
    if isinstance(value, Tensor):
        mine = local_tensor(value)  # sharded by FSDP2
        if not hasattr(mine, "__tensor_flatten__"):
            yield mine
            return
        names, _ = mine.__tensor_flatten__()  # torchao's quantised tensors list their inner ones
        yield from plain_tensors([getattr(mine, name) for name in names])
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from plain_tensors(each)
    elif hasattr(value, "__dict__"):
        yield from plain_tensors(vars(value))


def is_quantised(state: Mapping[str, Any]) -> bool:
    """Return whether a parameter's state holds codes instead of numbers."""
    return any(not t.is_floating_point() and t.dim() for t in plain_tensors(state))


def num_paged_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of state that bitsandbytes keeps in unified memory, which can be evicted."""
    paged = (t for t in plain_tensors(optimizer.state) if getattr(t, "is_paged", False))
    return sum(tensor.nbytes for tensor in paged)


Multiplier = Callable[[int], float]
"""Step number from 0 -> share of the peak learning rate."""


def build_schedule(plan: Plan) -> Multiplier:
    """Return the schedule: linear warm-up from peak / warm-up steps, then the option's shape."""
    if isinstance(plan.config.schedule, CustomSchedule):
        return build_own_schedule(plan)
    warmup, total = plan.steps.warmup, plan.steps.total
    shape = SHAPES[plan.config.schedule.option]

    def multiplier(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return shape(plan, (step - warmup) / max(1, total - warmup))

    return multiplier


def _linear(plan: Plan, progress: float) -> float:
    return 1.0 + (cast(DecayingSchedule, plan.config.schedule).final_frac - 1.0) * progress


def _cosine(plan: Plan, progress: float) -> float:
    final = cast(DecayingSchedule, plan.config.schedule).final_frac
    return final + (1.0 - final) * (1.0 + math.cos(math.pi * progress)) / 2


def _wsd(plan: Plan, progress: float) -> float:
    schedule = cast(WSDSchedule, plan.config.schedule)
    total, warmup = plan.steps.total, plan.steps.warmup
    # A decay longer than the steps after warm-up starts at the end of warm-up.
    decay = min(1.0, max(1e-9, schedule.decay_frac * total / max(1, total - warmup)))
    return 1.0 + (schedule.final_frac - 1.0) * max(0.0, (progress - 1.0 + decay) / decay)


SHAPES: dict[str, Callable[[Plan, float], float]] = {
    "constant": lambda plan, progress: 1.0,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
}
"""Option of the group `schedule` -> multiplier over the share of the run after warm-up."""
