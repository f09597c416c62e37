"""Prediction of a plan's peak memory: evaluation, two steps and evaluation on fake tensors."""

import importlib
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from eke.common.errors import RunError
from eke.common.python_runtime import describe_missing_api
from eke.common.text import first_line
from eke.config.parts import own_parts
from eke.config.schema import Backend, CustomData, CustomModel, Packing
from eke.config.schema.resources import Distributed
from eke.estimate.memory.components import Method, Traced
from eke.models.families import family_of
from eke.models.sizes import OPTIMIZER_REGISTRY, is_ragged, optimizer_entry
from eke.plan.own_code import where_raised
from eke.plan.planner import MicroBatchShape, Plan, evaluated, simulated_micro_batches
from eke.plan.planner.planner import FLASH_CAPABILITY
from eke.training.batches.batches import CacheRelease, MicroBatch, probe_sample
from eke.training.batches.dataset import build_collator
from eke.training.batches.sampler import evenly_spaced
from eke.training.batches.tasks import concatenate_samples, is_packed
from eke.training.custom.outputs import logits_of
from eke.training.custom.samples import open_own
from eke.training.loop.step import add_evaluation, take_step
from eke.training.model.activation_offload import build_activation_offload
from eke.training.model.adapters import is_four_bit
from eke.training.model.attention_kernels import pinned_backend
from eke.training.model.loss import build_compiled_loss
from eke.training.model.number_formats import build_formats, compile_model
from eke.training.model.save_model import build_trainable
from eke.training.optimizer.build_optimizer import (
    build_optimizer,
    evaluation_weights,
    plain_tensors,
)
from eke.training.optimizer.update import InBackwardUpdate, PlainUpdate, Update, set_learning_rate
from eke.training.trace import operations
from eke.training.trace.allocator_model import CachingAllocator, PlainSum
from eke.training.trace.compiled import TRACED, compile_for_trace
from eke.training.trace.fake_device import fake_surroundings, not_compiled, to_fake
from eke.training.trace.fake_gpu import fake_gpu
from eke.training.trace.operations import Questions, Workspaces
from eke.training.trace.trace import (
    AUTOCAST,
    BATCH,
    EMPTY_CACHE,
    GRADIENTS,
    MASTER,
    OPTIMIZER,
    STATES,
    WEIGHTS,
    History,
    StorageTrace,
    replay,
    watched_attention,
)


class Untraceable(Exception):
    """Raised for a step that does not run on fake tensors, with a reason in one line."""


@dataclass
class _TraceablePlan:
    """Plan whose step runs on fake tensors, and its differences from the requested plan."""

    plan: Plan
    method: Method = Method.trace
    notes: list[str] = field(default_factory=list)

    def bound(self, note: str) -> None:
        """Add a note on a difference that makes the trace an upper bound."""
        self.notes.append(note)
        self.method = Method.upper_bound

    def change(self, **groups: object) -> None:
        """Replace groups of the configuration."""
        config = replace(self.plan.config, **groups)  # type: ignore[arg-type]  # groups by name
        self.plan = replace(self.plan, config=config)

    def leave_uncompiled(self) -> None:
        """Trace the eager model."""
        compiler = self.plan.config.compile
        self.change(compile=replace(compiler, option="none"))
        self.bound(f"compile={compiler.option}: the eager model is traced")

    def compute(self, **formats: object) -> None:
        """Replace formats and implementations."""
        compute = replace(self.plan.compute, **formats)  # type: ignore[arg-type]  # by name
        self.plan = replace(self.plan, compute=compute)


def _adapt_for_trace(plan: Plan) -> _TraceablePlan:
    """Replace parts of the plan that cannot be traced by parts that need as much memory or more."""
    if is_four_bit(plan):
        raise Untraceable("peft=qlora: weights become 4-bit where bitsandbytes reads their values")
    found, config = _TraceablePlan(plan), plan.config
    processes, compiler = plan.ranks.option, config.compile.option
    replays = plan.device.kind == "cuda" and config.compile.replays_graphs
    if plan.config.compile.is_on and (compiler not in TRACED or replays):
        found.leave_uncompiled()
    if processes != "none":
        if plan.compute.optimizer_implementation == "deepspeed_cpu":
            found.compute(optimizer_implementation="fused")
        found.notes.append(
            f"distributed={processes}: one process with all weights is traced; activations, logits "
            "and temporaries of the passes hold, what processes share and exchange is not in it"
        )
    if plan.ranks.fsdp:  # otherwise weights that are not gathered in 16 bits stay uncast
        found.change(distributed=Distributed("none"))
    _adapt_kernels(found)
    _adapt_optimizer(found)
    if not family_of(config).is_known and not isinstance(config.model, CustomModel):
        found.notes.append("parameters that no output depends on are taken for trained")
    if config.engine.is_trainer:
        found.notes.append("engine=trainer: traced as eke's own loop")
    return found


def _adapt_kernels(found: _TraceablePlan) -> None:
    attention, kernels = found.plan.config.attention, found.plan.config.kernels
    if attention.option in ("flash2", "flash3"):
        found.change(attention=replace(attention, option="sdpa", backend=Backend.flash))
        found.notes.append(f"attention={attention.option}: traced as PyTorch's flash kernel")
    if attention.option == "flex":
        found.change(attention=replace(attention, option="sdpa", backend=Backend.auto))
        found.notes.append("attention=flex: traced as sdpa, without flex's block mask")
    if kernels.is_liger:
        found.change(kernels=replace(kernels, option="none"))
        found.bound("kernels=liger: the plain operations are traced, which keep no less")
    if found.plan.compute.float8 != "off":
        found.compute(float8="off")
        found.notes.append("precision.float8: traced without its float8 copies of operands")


def _adapt_optimizer(found: _TraceablePlan) -> None:
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
    """Return the predicted peaks of a plan's first process. Raises Untraceable."""
    adapted = _adapt_for_trace(plan)
    try:
        history = _traced(adapted)
    except Untraceable:
        if not adapted.plan.config.compile.is_on:
            raise
        adapted.leave_uncompiled()
        history = _traced(adapted)
    if isinstance(plan.config.data, CustomData) and not _own_micro_batch(plan, False)[1]:
        adapted.notes.append("samples differ in size: the largest of 64 is traced")
    for name in sorted(history.inexact):
        adapted.notes.append(f"{name}: its kernel allocates memory that a trace does not contain")
    apart = (*STATES, AUTOCAST) if plan.ranks.fsdp else STATES
    allocator = CachingAllocator() if plan.device.kind == "cuda" else PlainSum()
    peaks = replay(history, allocator, apart)
    notes = tuple(adapted.notes)
    return replace(peaks, method=adapted.method, notes=notes, is_exact=not notes)


def _traced(adapted: _TraceablePlan) -> History:
    try:
        return trace_history(adapted.plan)
    except RunError as error:
        raise Untraceable(str(error)) from error
    except Exception as error:  # private functions of torch may change in any way
        if where := where_raised(error):
            raise Untraceable(f"{where}: {type(error).__name__}: {first_line(error)}") from error
        # Report the place: a library's own message would be misleading.
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        where = f"{type(error).__name__} in {frame.f_globals.get('__name__', '?')}"
        why = (
            describe_missing_api(error)
            or f"the step does not run on tensors without data ({where})"
        )
        raise Untraceable(why) from error


_LOOKED_AT = 64
"""Evenly spaced samples of own data, of which the largest is traced."""


def _own_micro_batch(plan: Plan, evaluation: bool) -> tuple[MicroBatch, bool]:
    """Return a micro-batch of the largest sample, and whether samples are equally large."""
    *splits, collate = open_own(plan)
    samples, size = splits[evaluation], plan.batch.per_device
    if evaluation:
        size = plan.batch.eval_per_device
    drawn = [samples[0, n] for n in evenly_spaced(len(samples), _LOOKED_AT).tolist()]
    sizes = [sum(t.nbytes for t in collate([each]).tensors) for each in drawn]
    largest = drawn[sizes.index(max(sizes))]
    return collate([largest] * size), len({*sizes}) == 1


def _make_batch(plan: Plan, micro: MicroBatchShape, evaluation: bool = False) -> MicroBatch:
    if isinstance(plan.config.data, CustomData):
        return _own_micro_batch(plan, evaluation)[0]
    sample = probe_sample(plan, micro.source, micro.target, micro.rows)
    if plan.config.data.packing is Packing.on and is_ragged(plan.config):
        sample = concatenate_samples([sample])
    return build_collator(plan)([sample] * micro.rows)


def _is_padded(plan: Plan) -> bool:
    """Return whether a row of a batch can have padding at its end."""
    data = plan.config.data
    ragged = is_ragged(plan.config) and not is_packed(plan.config)
    return ragged or data.seq_len % (data.pad_to_multiple_of or 1) != 0


def trace_history(plan: Plan) -> History:
    """Return events of storages from loading the model to the second evaluation."""
    device = fake_gpu() if plan.device.kind == "cuda" else torch.device("cpu")
    operations.capability = plan.device.capability or FLASH_CAPABILITY
    with torch.device("meta"):
        model, _ = build_trainable(plan, torch.device("meta"))
    train = _make_batch(plan, simulated_micro_batches(plan).expected)
    evaluation = _make_batch(plan, evaluated(plan), evaluation=True)
    mode = FakeTensorMode()
    workspaces = Workspaces(plan.device.kind, plan.device.capability)
    questions = Questions(_is_padded(plan), mode, is_own=bool(own_parts(plan.config)))
    watch = StorageTrace(mode, device, questions, workspaces)
    if package := optimizer_entry(plan.config.optimizer).package:
        importlib.import_module(package)  # before its functions are patched
    if plan.config.compile.is_on:
        importlib.import_module("torch._inductor.compile_fx")  # before it is patched
    with fake_surroundings(compile_for_trace if plan.config.compile.is_on else not_compiled):
        model = to_fake(model, mode, device)
        with watched_attention(watch), watch:
            Training(plan, model, watch, device).run(train, evaluation)
    watch.history.inexact = questions.inexact
    return watch.history


_NUM_STEPS = 2
"""Number of traced steps. The first creates the optimizer's state. Later ones equal the second."""

_NUM_MICRO_BATCHES = 2
"""Number of traced micro-batches. From the second on, gradients are added to existing ones."""


class Training:
    """State of a traced training, stepped by `take_step` like a run, while the trace is on."""

    def __init__(
        self, plan: Plan, model: nn.Module, trace: StorageTrace, device: torch.device
    ) -> None:
        self.plan, self.trace, self.device = plan, trace, device
        trace.begin("load")
        weights = [*model.parameters(), *model.buffers()]
        trace.add(weights, WEIGHTS)
        self.optimizer = build_optimizer(plan, model)
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        known = {id(p) for p in weights}
        trace.call([p for p in stepped if id(p) not in known], MASTER)
        self.formats = build_formats(plan, device, model)
        trace.call(self.formats.held, WEIGHTS)
        parameters = [p for p in model.parameters() if p.requires_grad]
        scaler, record = self.formats.scaler, plan.config.train.record_grad_norm
        self.update: Update = PlainUpdate(plan, model, self.optimizer, scaler, parameters)
        if plan.config.memory.optimizer_in_backward:  # as in `TrainingState`
            self.update = InBackwardUpdate(self.optimizer, parameters, record)
        self.model, self.loss = compile_model(plan, model), build_compiled_loss(plan, model)
        self.offload = build_activation_offload(plan, model, self.formats.held)
        self.cache_release = CacheRelease(None, device)  # recorded by `_step`

    def run(self, train: MicroBatch, evaluation: MicroBatch) -> None:
        """Evaluate, take two steps and evaluate again. Values in the batches have no effect."""
        history, trace = self.trace.history, self.trace
        self.model.register_forward_hook(self._note_logits)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]  # torch 2.13
        with pinned_backend(self.plan):
            trace.begin("evaluation")
            start = len(history.events)
            self._evaluate(evaluation)
            end = len(history.events)
            for step in range(_NUM_STEPS):
                self._step(train, step)
        trace.begin("evaluation")
        history.repeat(start, end)

    def _note_logits(self, _: Any, __: Any, output: Any) -> None:
        with suppress(RunError):  # own code may return only a loss
            self.trace.record_logits(logits_of(output))

    def _note_gradient(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            self.trace.call([parameter.grad], GRADIENTS)

    def _step(self, batch: MicroBatch, step: int) -> None:
        trace, plan = self.trace, self.plan
        # On a CPU a run does not measure its first step.
        counted = step > 0 or trace.kind != "cpu"
        trace.begin("data", counted)
        every = [self._moved(batch) for _ in range(plan.batch.accumulation)]
        cut = every[:_NUM_MICRO_BATCHES]
        set_learning_rate(self.optimizer, plan.config.optimizer.lr)
        # Record a release only if every step has one. Otherwise the peak is between releases.
        releases = plan.config.memory.empty_cache_every == 1 and trace.kind != "cpu"

        def enter(phase: str) -> None:
            if phase == "backward" and releases:
                trace.history.events.append(EMPTY_CACHE)
            trace.begin(phase, counted)

        take_step(self, cut, max(1, batch.num_targets), step, enter)
        del every, cut
        states = [*plain_tensors(self.optimizer.state)]
        trace.call(states, OPTIMIZER)
        if trace.kind == "cpu":  # records exclude the optimizer's counters
            for tensor in states:
                if not tensor.dim():
                    trace.forget(tensor)

    @torch.no_grad()
    def _evaluate(self, batch: MicroBatch) -> None:
        self.model.eval()
        total = torch.zeros((), device=self.device)
        with evaluation_weights(self.optimizer):
            add_evaluation(self, self._moved(batch), total)
        self.model.train()

    def _moved(self, batch: MicroBatch) -> MicroBatch:
        moved = batch.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device=self.device))
        self.trace.call(moved.tensors, BATCH)
        # Tensors of eke's loader are allocated by NumPy.
        if self.trace.kind == "cpu" and batch.labels is not None:
            for tensor in moved.tensors:
                self.trace.forget(tensor)
        return moved
