"""Step timing without device synchronization, random states, and a float16 loss scale."""

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eke.plan.record import metrics
from eke.training.distributed.ranks import SINGLE_PROCESS, Ranks, StepTotals


class Clock:
    """Marks on the device's time line (a GPU's events), whose differences are read later."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.has_stream = device is not None and device.type == "cuda"
        self.stamp: Callable[[], Any] = self._record if self.has_stream else time.perf_counter
        """Mark of this moment, in the current stream if there is one."""

    def _record(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch 2.13
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks. Waits for the second mark."""
        if not self.has_stream:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


@dataclass
class _StepNote:
    """Values of one step until the next write. Tensors stay on the device."""

    step: int
    stamps: list[tuple[str, Any]]
    """Phases and the marks of their start. The last mark is the end of the step."""
    loss: Tensor
    """Loss summed over this rank's targets, with the parts of `with_parts` or `with_router`."""
    grad_norm: Tensor | None
    """Gradient norm on the device. None if not needed."""
    learning_rate: float
    totals: StepTotals
    unsteady: bool = False
    """True if the compiler ran, memory was measured, or a checkpoint was written in this step."""


def _stack(values: list[Tensor]) -> Tensor:
    """Return float32 `[tensors, elements]` from tensors of equal size."""
    return torch.stack(values).float().reshape(len(values), -1)


@dataclass
class Meter:
    """Measurements of steps, written as rows."""

    clock: Clock
    attempt: int
    timed_from: int
    """First step that is not warm-up."""
    cut: int = 0
    """Number of this attempt's batch division among the divisions of the run."""
    phase: str = "build"
    """Current phase of the run, reported with an out-of-memory error."""
    notes: list[_StepNote] = field(default_factory=list)
    sources: tuple[str, ...] = ()
    watcher: Callable[[str], None] | None = None
    """Function called with the name of each phase before it begins."""
    is_shared: Callable[[], bool | None] = lambda: None
    """Return whether another run has used the device so far."""
    is_saving: bool = False
    """True if a thread is writing a checkpoint. Such steps are excluded from timings."""
    steps_ended: int = 0
    _stamps: list[tuple[str, Any]] = field(default_factory=list)

    def leave(self, phase: str) -> None:
        """Begin work outside a step. The next step starts with its first phase."""
        self.phase = phase
        self._stamps = []

    def enter(self, phase: str) -> None:
        """Begin a phase of the step and end the phase before."""
        if self.watcher is not None:
            self.watcher(phase)
        self.phase = phase
        self._stamps.append((phase, self.clock.stamp()))

    def end_step(
        self,
        step: int,
        loss: Tensor,
        grad_norm: Tensor | None,
        learning_rate: float,
        totals: StepTotals,
    ) -> None:
        """Record a step that is over on the host. The device may not have finished it."""
        end = self.clock.stamp()
        self._stamps.append(("end", end))
        noted = self._stamps, loss, grad_norm, learning_rate, totals, self.is_saving
        self.notes.append(_StepNote(step, *noted))
        self.steps_ended += 1
        self._stamps = [("between", end)]

    def flush(self, ranks: Ranks = SINGLE_PROCESS) -> list[metrics.Row]:
        """Return rows of the steps since the last call. Only here the host waits for the device."""
        if not self.notes:
            return []
        measured = [note.grad_norm for note in self.notes if note.grad_norm is not None]
        # Each rank has its part of the loss, and all have the same norm. Queue both before the
        # first wait.
        losses = ranks.sum(_stack([note.loss for note in self.notes]))
        norms = iter((_stack(measured) if measured else torch.empty(0, 1)).tolist())
        notes, self.notes = self.notes, []
        shared = {metrics.SHARED: 1} if self.is_shared() else {}
        return [
            self._row(note, loss, parts, None if note.grad_norm is None else next(norms)[0])
            | shared
            for note, (loss, *parts) in zip(notes, losses.tolist(), strict=True)
        ]

    def _row(
        self, note: _StepNote, loss: float, parts: list[float], grad_norm: float | None
    ) -> metrics.Row:
        seconds = dict.fromkeys(metrics.PHASES, 0.0)
        for (phase, start), (_, end) in zip(note.stamps, note.stamps[1:], strict=False):
            seconds[phase] += self.clock.seconds(start, end)
        router = {}
        # The last part is the router's loss, which is reported separately from the task's.
        if len(parts) > len(self.sources):
            *parts, share = parts
            loss -= share
            router = {metrics.ROUTER_LOSS: share / note.totals.num_targets}
        row: metrics.Row = {
            metrics.STEP: note.step + 1,
            metrics.ATTEMPT: self.attempt,
            metrics.LOSS: loss / note.totals.num_targets,
            **router,
            **({} if grad_norm is None else {metrics.GRAD_NORM: grad_norm}),
            "train/learning_rate": note.learning_rate,
            metrics.STEP_TIME: sum(seconds.values()),
            **{metrics.PHASE_KEYS[phase]: value for phase, value in seconds.items()},
            metrics.SAMPLES: note.totals.num_samples,
            metrics.TOKENS: note.totals.num_tokens,
        }
        counts = note.totals.samples_of, note.totals.targets_of, parts
        for name, count, targets, part in zip(self.sources, *counts, strict=True):
            row[f"{metrics.SAMPLES}/{name}"] = count
            if targets:
                row[f"{metrics.LOSS}/{name}"] = part / targets
        if self.cut:
            row[metrics.CUT] = self.cut
        if note.step < self.timed_from or note.unsteady:
            row[metrics.WARMUP] = 1
        return row


RandomState = dict[str, Any]
"""States by generator, as tensors or numbers that `weights_only` can load."""


def capture_random_state() -> RandomState:
    """Return the state of this process's random generators."""
    name, keys, *rest = np.random.get_state(legacy=True)
    # Reading the state of a GPU would initialize CUDA, also in a run on the CPU.
    cuda_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch 2.13
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if cuda_in_use else [],
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }


def restore_random_state(state: RandomState) -> None:
    """Restore the random generators, of GPUs as many as this machine has."""
    torch.set_rng_state(torch.as_tensor(state["torch"], dtype=torch.uint8))  # a list, from JSON
    of_gpus = [torch.as_tensor(each, dtype=torch.uint8) for each in state["cuda"]]
    torch.cuda.set_rng_state_all(of_gpus[: torch.cuda.device_count()])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))


GROWTH_INTERVAL = 2000
"""Steps without overflow before the scale is doubled. torch.amp.GradScaler's default."""


@dataclass
class LossScale:
    """Loss scale: halved on overflow, doubled after 2,000 steps without one, as in GradScaler."""

    value: float = 2.0**16
    good_steps: int = 0
    """Steps since the last change."""

    def update(self, overflowed: bool) -> None:
        """Adjust the scale after a step, which an overflow has skipped."""
        if overflowed:
            self.value, self.good_steps = self.value / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, float]:
        """Return plain numbers for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state that `state_dict` returned."""
        self.value, self.good_steps = state["value"], int(state["good_steps"])
