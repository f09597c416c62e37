"""Predict a plan's peak memory by a trace; replaces operations that cannot be traced."""

import importlib
from dataclasses import dataclass, field, replace

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
from eke.training.trace import operations
from eke.training.trace.allocator import (
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


@dataclass
class TraceablePlan:
    """A plan whose step runs on fake tensors, and how that differs from the plan asked for."""

    plan: Plan
    method: Method = Method.trace
    notes: list[str] = field(default_factory=list)

    def bound(self, note: str) -> None:
        """Note a difference that makes the trace an upper bound."""
        self.notes.append(note)
        self.method = Method.upper_bound

    def change(self, **groups: object) -> None:
        """Replace groups of the configuration."""
        config = replace(self.plan.config, **groups)  # type: ignore[arg-type]  # groups by name
        self.plan = replace(self.plan, config=config)

    def compute(self, **formats: object) -> None:
        """Replace formats and implementations."""
        compute = replace(self.plan.compute, **formats)  # type: ignore[arg-type]  # by name
        self.plan = replace(self.plan, compute=compute)


def adapt_for_trace(plan: Plan) -> TraceablePlan:
    """The plan with what no trace can see replaced by what needs as much memory, or more.

    Raises:
        Untraceable: nothing would take its place truthfully.
    """
    if is_four_bit(plan):
        raise Untraceable("peft=qlora: weights become 4-bit where bitsandbytes reads their values")
    found, config = TraceablePlan(plan), plan.config
    compiler, processes = config.compile.option, config.distributed.option
    if compiler != "none":
        found.bound(f"compile={compiler}: the eager model is traced, which keeps no less")
    if processes != "none":
        if plan.compute.optimizer_implementation == "deepspeed_cpu":
            found.compute(optimizer_implementation="fused")
        found.notes.append(
            f"distributed={processes}: one process with all weights is traced; activations, logits "
            "and temporaries of the passes hold, what processes share and exchange is not in it"
        )
    _adapt_kernels(found)
    _adapt_optimizer(found)
    if not family_of(config).is_known:
        found.notes.append("parameters that no output depends on are taken for trained")
    if config.engine.option == "trainer":
        found.notes.append("engine=trainer: traced as eke's own loop")
    return found


def _adapt_kernels(found: TraceablePlan) -> None:
    attention, kernels = found.plan.config.attention, found.plan.config.kernels
    if attention.option in ("flash2", "flash3"):
        found.change(attention=replace(attention, option="sdpa", backend=Backend.flash))
        found.notes.append(f"attention={attention.option}: traced as PyTorch's flash kernel")
    if attention.option == "flex":
        found.change(attention=replace(attention, option="sdpa", backend=Backend.auto))
        found.notes.append("attention=flex: traced as sdpa, without flex's block mask")
    if kernels.option == "liger":
        found.change(kernels=replace(kernels, option="none"))
        found.bound("kernels=liger: the plain operations are traced, which keep no less")
    if found.plan.compute.float8 != "off":
        found.compute(float8="off")
        found.notes.append("precision.float8: traced without its float8 copies of operands")


def _adapt_optimizer(found: TraceablePlan) -> None:
    optimizer = found.plan.config.optimizer
    option, known = optimizer.option, optimizer_entry(optimizer)
    if known.twin:
        loop = OPTIMIZER_REGISTRY[known.twin].implementation
        found.change(optimizer=replace(optimizer, option=known.twin))
        found.compute(optimizer_implementation=loop)
        found.notes.append(f"optimizer={option}: traced as PyTorch's {loop} AdamW")
    elif known.compiles:
        found.bound(f"optimizer={option}: its compiled step is traced eagerly")
    elif known.pages and found.plan.device.kind == "cuda":
        found.notes.append(f"optimizer={option}: pages lie in the host's memory")


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
    peaks = replay(history, CachingAllocator() if plan.device.kind == "cuda" else PlainSum())
    return Traced(
        allocated=peaks.allocated,
        reserved=peaks.reserved,
        components=peaks.components,
        beside=peaks.beside,
        method=adapted.method,
        notes=tuple(adapted.notes),
        is_exact=not adapted.notes,
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
    workspaces = Workspaces(plan.device.kind, plan.device.capability)
    watch = StorageTrace(mode, device, Questions(is_padded(plan), mode), workspaces)
    if package := optimizer_entry(plan.config.optimizer).package:
        importlib.import_module(package)  # before its functions are replaced
    with fake_surroundings():
        model = to_fake(model, mode, device)
        with watched_attention(watch), watch:
            prepare_traced_training(plan, model, watch, device).run(train, evaluation)
    return watch.history
