"""Predict a plan's peak memory by a trace; replaces operations that cannot be traced."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from eke.common.errors import RunError
from eke.common.runtime import lacking
from eke.config.schema import Backend
from eke.estimate.memory.components import Method, Traced
from eke.models.families import family_of
from eke.models.sizes import OPTIMIZER_REGISTRY, optimizer_entry
from eke.plan.planner import Plan, drawn, evaluated
from eke.training.model.adapters import is_four_bit
from eke.training.model.save_model import build_trainable
from eke.training.optimizer.build_optimizer import build_optimizer
from eke.training.trace import operations
from eke.training.trace.allocator import (
    Allocator,
    CachingAllocator,
    PlainSum,
    fake_gpu,
    is_padded,
    make_batch,
)
from eke.training.trace.fakes import fake_surroundings, to_fake
from eke.training.trace.operations import Questions, Workspaces
from eke.training.trace.trace import History, StorageTrace, replay, watched_attention
from eke.training.trace.trace_step import prepare_traced_training


class Untraceable(Exception):
    """A step that does not run on fake tensors; says why in one line."""


@dataclass(frozen=True)
class TraceablePlan:
    """A plan whose step runs on fake tensors."""

    plan: Plan
    method: Method
    notes: tuple[str, ...] = ()
    is_exact: bool = True


def adapt_for_trace(plan: Plan) -> TraceablePlan:
    """The plan with what no trace can see replaced by what needs as much memory, or more.

    Raises:
        Untraceable: nothing would take its place truthfully.
    """
    found = TraceablePlan(plan, Method.trace)
    for rule in RULES:
        found = rule(found)
    return found


def _note(found: TraceablePlan, note: str) -> TraceablePlan:
    return replace(found, notes=(*found.notes, note), is_exact=False)


def _bound(found: TraceablePlan, note: str) -> TraceablePlan:
    return replace(_note(found, note), method=Method.upper_bound)


def _with(found: TraceablePlan, **groups: object) -> TraceablePlan:
    config = replace(found.plan.config, **groups)  # type: ignore[arg-type]  # groups by name
    return replace(found, plan=replace(found.plan, config=config))


def _compile(found: TraceablePlan) -> TraceablePlan:
    option = found.plan.config.compile.option
    if option == "none":
        return found
    return _bound(found, f"compile={option}: the eager model is traced, which keeps no less")


def _distributed(found: TraceablePlan) -> TraceablePlan:
    option = found.plan.config.distributed.option
    if option == "none":
        return found
    if found.plan.compute.optimizer_implementation == "deepspeed_cpu":
        compute = replace(found.plan.compute, optimizer_implementation="fused")
        found = replace(found, plan=replace(found.plan, compute=compute))
    return _note(
        found,
        f"distributed={option}: one process with all weights is traced; activations, logits and "
        "temporaries of the passes hold, what processes share and exchange is not in it",
    )


def _attention(found: TraceablePlan) -> TraceablePlan:
    attention = found.plan.config.attention
    if attention.option in ("flash2", "flash3"):
        found = _with(found, attention=replace(attention, option="sdpa", backend=Backend.flash))
        return _note(found, f"attention={attention.option}: traced as PyTorch's flash kernel")
    if attention.option == "flex":
        found = _with(found, attention=replace(attention, option="sdpa", backend=Backend.auto))
        return _note(found, "attention=flex: traced as sdpa, without flex's block mask")
    return found


def _kernels(found: TraceablePlan) -> TraceablePlan:
    kernels = found.plan.config.kernels
    if kernels.option != "liger":
        return found
    found = _with(found, kernels=replace(kernels, option="none"))
    return _bound(found, "kernels=liger: the plain operations are traced, which keep no less")


def _float8(found: TraceablePlan) -> TraceablePlan:
    if found.plan.compute.float8 == "off":
        return found
    compute = replace(found.plan.compute, float8="off")
    found = replace(found, plan=replace(found.plan, compute=compute))
    return _note(found, "precision.float8: traced without its float8 copies of operands")


def _optimizer(found: TraceablePlan) -> TraceablePlan:
    plan = found.plan
    optimizer = plan.config.optimizer
    option, known = optimizer.option, optimizer_entry(optimizer)
    if known.twin:
        found = _with(found, optimizer=replace(optimizer, option=known.twin))
        loop = OPTIMIZER_REGISTRY[known.twin].implementation
        compute = replace(plan.compute, optimizer_implementation=loop)
        found = replace(found, plan=replace(found.plan, compute=compute))
        return _note(found, f"optimizer={option}: traced as PyTorch's {loop} AdamW")
    if known.compiles:
        return _bound(found, f"optimizer={option}: its compiled step is traced eagerly")
    if known.pages and plan.device.kind == "cuda":
        return _note(found, f"optimizer={option}: pages lie in the host's memory")
    return found


def _four_bits(found: TraceablePlan) -> TraceablePlan:
    if is_four_bit(found.plan):
        raise Untraceable("peft=qlora: weights become 4-bit where bitsandbytes reads their values")
    return found


def _data(found: TraceablePlan) -> TraceablePlan:
    config = found.plan.config
    if not family_of(config).is_known:
        found = _note(found, "parameters that no output depends on are taken for trained")
    if config.engine.option == "trainer":
        found = _note(found, "engine=trainer: traced as eke's own loop")
    return found


RULES: tuple[Callable[[TraceablePlan], TraceablePlan], ...] = (
    _four_bits, _compile, _distributed, _attention, _kernels, _float8, _optimizer, _data,
)  # fmt: skip


ALLOCATORS: dict[str, type[CachingAllocator] | type[PlainSum]] = {
    "cuda": CachingAllocator,
    "cpu": PlainSum,
}
"""`Device.kind` -> the model of its allocator."""


def trace(plan: Plan) -> Traced:
    """Predicted peaks of a plan's first process.

    Raises:
        Untraceable: this plan's step does not run on fake tensors.
    """
    adapted = adapt_for_trace(plan)
    try:
        history = trace_history(adapted.plan)
    except RunError as error:
        raise Untraceable(str(error)) from error
    except Exception as error:  # private parts of torch are in this; any of them may change
        raise Untraceable(lacking(error) or _unforeseen(error)) from error
    allocator: Allocator = ALLOCATORS[plan.device.kind]()
    peaks = replay(history, allocator)
    return Traced(
        allocated=peaks.allocated,
        reserved=peaks.reserved,
        components=peaks.components,
        beside=peaks.beside,
        method=adapted.method,
        notes=adapted.notes,
        is_exact=adapted.is_exact,
    )


def _unforeseen(error: Exception) -> str:
    """Where a step failed on fake tensors; a library's own text advises about something else."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    module = place.tb_frame.f_globals.get("__name__", "?") if place is not None else "?"
    return f"the step does not run on tensors without data ({type(error).__name__} in {module})"


def trace_history(plan: Plan) -> History:
    """Births and deaths of storages from loading the model to the second evaluation."""
    device = fake_gpu() if plan.device.kind == "cuda" else torch.device("cpu")
    operations.capability = plan.device.capability or operations.FLASH_CAPABILITY
    with torch.device("meta"):
        model, _ = build_trainable(plan, torch.device("meta"))
    train = make_batch(plan, drawn(plan).expected)
    evaluation = make_batch(plan, evaluated(plan))
    mode = FakeTensorMode()

    def make_empty(
        shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        with mode:
            return torch.empty(shape, dtype=dtype, device=device)

    questions = Questions(is_padded(plan), make_empty)
    watch = StorageTrace(
        mode, device, questions, Workspaces(plan.device.kind, plan.device.capability)
    )
    if package := optimizer_entry(plan.config.optimizer).package:
        importlib.import_module(package)  # before its functions are replaced
    with fake_surroundings():
        model = to_fake(model, mode, device)
        with watched_attention(watch), watch:
            training = prepare_traced_training(
                plan, model, lambda: build_optimizer(plan, model), watch, device
            )
            training.run(train, evaluation)
    return watch.history
