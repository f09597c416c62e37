"""Training on fake tensors: evaluation, two steps, evaluation, as in a run."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eke.plan.planner import Plan
from eke.training.batches.batches import CacheRelease, MicroBatch
from eke.training.loop.step import Stepped, add_evaluation, take_step
from eke.training.model.attention_kernels import pinned_backend
from eke.training.model.checkpointing import build_activation_offload
from eke.training.model.loss import build_loss
from eke.training.model.number_formats import build_formats
from eke.training.optimizer.build_optimizer import evaluation_weights, plain_tensors
from eke.training.optimizer.update import InBackwardUpdate, PlainUpdate, Update, set_learning_rate
from eke.training.trace.trace import BATCH, GRADIENTS, MASTER, OPTIMIZER, WEIGHTS, StorageTrace

NUM_STEPS = 2
"""The second step is like all later ones; the first makes the optimizer's state."""

NUM_MICRO_BATCHES = 2
"""From the second micro-batch on, gradients are added to what is there: all are alike."""


class TracedRelease(CacheRelease):
    """Tells the trace when the allocator's cache is emptied."""

    def __init__(self, every: int | None, trace: StorageTrace) -> None:
        super().__init__(every, torch.device("cpu"))
        self._trace = trace

    def after_forward(self, step: int) -> None:
        """Each time where every step empties it; else never: the peak lies between."""
        if self.every == 1 and self._trace.kind != "cpu":
            self._trace.history.empty_cache()


@dataclass(frozen=True)
class Training:
    """What a traced training works with."""

    plan: Plan
    model: nn.Module
    optimizer: torch.optim.Optimizer
    parts: Stepped
    device: torch.device
    trace: StorageTrace

    def run(self, train: MicroBatch, evaluation: MicroBatch) -> None:
        """Evaluate, take two steps, and evaluate as before.

        Args:
            train: a micro-batch on the host; the values in it do not count.
            evaluation: the same of evaluation.
        """
        history, trace = self.trace.history, self.trace
        self.model.register_forward_hook(lambda _, __, out: trace.saw_logits(out.logits))
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                _watch_gradient(parameter, trace)
        with pinned_backend(self.plan):
            trace.begin("evaluation")
            start = len(history.events)
            self._evaluate(evaluation)
            end = len(history.events)
            for step in range(NUM_STEPS):
                self._step(train, step)
        trace.begin("evaluation")
        history.repeat(start, end)

    def _step(self, batch: MicroBatch, step: int) -> None:
        trace, plan = self.trace, self.plan
        # On a CPU a run measures no step before its second.
        counted = step > 0 or trace.kind != "cpu"
        trace.begin("data", counted)
        every = [self._moved(batch) for _ in range(plan.batch.accumulation)]
        cut = every[:NUM_MICRO_BATCHES]
        set_learning_rate(self.optimizer, plan.config.optimizer.lr)
        enter = functools.partial(trace.begin, counted=counted)
        take_step(self.parts, cut, max(1, batch.num_targets), step, plan.config.optimizer.lr, enter)
        del every, cut
        trace.call(optimizer_tensors(self.optimizer), OPTIMIZER)
        if trace.kind == "cpu":  # a record leaves the optimizer's counters out
            for tensor in optimizer_tensors(self.optimizer):
                if not tensor.dim():
                    trace.forget(tensor)

    @torch.no_grad()
    def _evaluate(self, batch: MicroBatch) -> None:
        parts, model = self.parts, self.model
        model.eval()
        total = torch.zeros((), device=self.device)
        with evaluation_weights(self.optimizer):
            moved = self._moved(batch)
            add_evaluation(parts.model, parts.loss, parts.formats, moved, total)
        model.train()

    def _moved(self, batch: MicroBatch) -> MicroBatch:
        device = self.device

        def fake(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

        moved = batch.map(fake)
        self.trace.call(moved.tensors, BATCH)
        if self.trace.kind == "cpu":  # the very tensors of the loader, made by NumPy
            for tensor in moved.tensors:
                self.trace.forget(tensor)
        return moved


def prepare_traced_training(
    plan: Plan,
    model: nn.Module,
    make_optimizer: Callable[[], torch.optim.Optimizer],
    trace: StorageTrace,
    device: torch.device,
) -> Training:
    """A model on fake tensors and what trains it; the trace is on, and knows the weights after it.

    Args:
        plan: the run.
        model: its tensors are fake and on `device`.
        make_optimizer: makes the optimizer of the model.
        trace: watches.
        device: the fake one.
    """
    trace.begin("load")
    weights = [*model.parameters(), *model.buffers()]
    trace.add(weights, WEIGHTS)
    optimizer = make_optimizer()
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    known = {id(p) for p in weights}
    trace.call([p for p in stepped if id(p) not in known], MASTER)
    formats = build_formats(plan, device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    parts = Stepped(
        model=model,
        loss=build_loss(plan),
        update=_update(plan, model, optimizer, formats.scaler, parameters),
        formats=formats,
        offload=build_activation_offload(plan, model),
        cache_release=TracedRelease(plan.config.memory.empty_cache_every, trace),
    )
    return Training(plan, model, optimizer, parts, device, trace)


def _update(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    parameters: list[nn.Parameter],
) -> Update:
    """The step of a process that has it all, as `deepspeed_engine` gives it."""
    if plan.config.memory.optimizer_in_backward:
        return InBackwardUpdate(optimizer, parameters, plan.config.train.record_grad_norm)
    return PlainUpdate(plan, model, optimizer, scaler, parameters)


def _watch_gradient(parameter: nn.Parameter, trace: StorageTrace) -> None:
    def note(found: Tensor) -> None:
        if found.grad is not None:
            trace.call([found.grad], GRADIENTS)

    hook: Any = parameter.register_post_accumulate_grad_hook  # torch 2.13: no annotations
    hook(note)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
    """Every plain tensor of the state."""
    return [t for state in optimizer.state.values() for t in plain_tensors(state)]
