"""From a plan to what its memory will be."""

import importlib

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from eke.common.errors import RunError
from eke.common.torch_compat import lacking
from eke.estimate.memory.values import Traced
from eke.models.sizes import describe
from eke.plan.planner import Plan, drawn, evaluated
from eke.training.model.trainable import build_trainable
from eke.training.optimizer import build_optimizer
from eke.training.trace import sdpa
from eke.training.trace.allocator import Allocator, CachingAllocator, PlainSum
from eke.training.trace.batches import is_padded, make_batch
from eke.training.trace.data_dependent_ops import Questions
from eke.training.trace.device import fake_gpu
from eke.training.trace.fakes import fake_surroundings, to_fake
from eke.training.trace.history import History, replay
from eke.training.trace.step import prepare
from eke.training.trace.trace import StorageTrace, watched_attention
from eke.training.trace.trace_substitutions import Untraceable, adapt
from eke.training.trace.workspaces import Workspaces

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
    adapted = adapt(plan)
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
    sdpa.capability = plan.device.capability or sdpa.FLASH_CAPABILITY
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
    if package := describe(plan.config.optimizer).package:
        importlib.import_module(package)  # before its functions are replaced
    with fake_surroundings():
        model = to_fake(model, mode, device)
        with watched_attention(watch), watch:
            training = prepare(plan, model, lambda: build_optimizer(plan, model), watch, device)
            training.run(train, evaluation)
    return watch.history
