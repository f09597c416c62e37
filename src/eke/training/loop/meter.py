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
from eke.training.distributed.ranks import ALONE, Ranks, StepTotals


class Clock:
    """Marks moments on the device's time line; durations are read later.

    Of a GPU by events in its stream, so that asking the time does not stop it.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.has_stream = device is not None and device.type == "cuda"
        self.stamp: Callable[[], Any] = self._record if self.has_stream else time.perf_counter
        """This moment, in the current stream if there is one."""

    def _record(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch 2.13
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two moments; waits for the second."""
        if not self.has_stream:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


@dataclass
class StepNote:
    """Values of one step until the next write; tensors stay on the device."""

    step: int
    stamps: list[tuple[str, Any]]
    """Phase that starts, and when; the last one is the end."""
    loss: Tensor
    """Summed over this rank's targets, as of `with_parts` or `with_router`."""
    grad_norm: Tensor | None
    """None if not needed."""
    learning_rate: float
    totals: StepTotals
    unsteady: bool = False
    """The compiler ran in this step, its memory was measured, or a checkpoint was written."""


def _stack(values: list[Tensor]) -> Tensor:
    """Float32, shape (tensors, elements), from tensors of equal size."""
    return torch.stack(values).float().reshape(len(values), -1)


@dataclass
class Meter:
    """Notes steps and turns them into rows."""

    clock: Clock
    attempt: int
    timed_from: int
    """Steps before this one are warm-up."""
    cut: int = 0
    """Number of the cut of its steps among those of the run."""
    phase: str = "build"
    """What the run is doing now; an out-of-memory error is reported with it."""
    notes: list[StepNote] = field(default_factory=list)
    sources: tuple[str, ...] = ()
    """Names of the sources of a mix."""
    watcher: Callable[[str], None] | None = None
    """Called with each phase before it begins."""
    is_shared: Callable[[], bool | None] = lambda: None
    """Whether another run has used the device so far."""
    is_saving: bool = False
    """A thread writes a checkpoint meanwhile: no step is timed."""
    steps_ended: int = 0
    """In this attempt."""
    _stamps: list[tuple[str, Any]] = field(default_factory=list)

    def leave(self, phase: str) -> None:
        """What is no part of a step begins; the next step starts where its first phase does."""
        self.phase = phase
        self._stamps = []

    def enter(self, phase: str) -> None:
        """A phase of the step begins; the one before ends."""
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
        """The step is over (on the host; the device may lag behind), and the next one begins."""
        end = self.clock.stamp()
        self._stamps.append(("end", end))
        noted = self._stamps, loss, grad_norm, learning_rate, totals, self.is_saving
        note = StepNote(step, *noted)
        self.notes.append(note)
        self.steps_ended += 1
        self._stamps = [("between", end)]

    def flush(self, ranks: Ranks = ALONE) -> list[metrics.Row]:
        """Rows of the steps noted since the last call: the one place that waits for the device.

        Each rank has noted its own part of the loss, and the norm of the gradient all share.
        """
        if not self.notes:
            return []
        measured = [note.grad_norm for note in self.notes if note.grad_norm is not None]
        # Both are queued before the first wait.
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
        self, note: StepNote, loss: float, parts: list[float], grad_norm: float | None
    ) -> metrics.Row:
        seconds = dict.fromkeys(metrics.PHASES, 0.0)
        for (phase, start), (_, end) in zip(note.stamps, note.stamps[1:], strict=False):
            seconds[phase] += self.clock.seconds(start, end)
        router = {}
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
"""`torch` and `cuda` hold tensors, `python` and `numpy` numbers: loadable with `weights_only`."""


def capture_random_state() -> RandomState:
    """The state of this process's generators now.

    Those of GPUs only once CUDA is in use: asking would start it, in a run on the CPU too.
    """
    name, keys, *rest = np.random.get_state(legacy=True)
    cuda_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch 2.13
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if cuda_in_use else [],
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }


def restore_random_state(state: RandomState) -> None:
    """Continue where the generators stood; of GPUs, as many of the first as there are here."""
    torch.set_rng_state(torch.as_tensor(state["torch"], dtype=torch.uint8))  # or read from JSON
    of_gpus = [torch.as_tensor(each, dtype=torch.uint8) for each in state["cuda"]]
    torch.cuda.set_rng_state_all(of_gpus[: torch.cuda.device_count()])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))


GROWTH_INTERVAL = 2000
"""Steps without an overflow before the scale is doubled: torch.amp.GradScaler's default."""


@dataclass
class LossScale:
    """Halved after an overflow, doubled after long without one, as torch's GradScaler."""

    value: float = 2.0**16
    good_steps: int = 0
    """Since the last change."""

    def update(self, overflowed: bool) -> None:
        """After a step that was taken, or skipped because its gradients were not finite."""
        if overflowed:
            self.value, self.good_steps = self.value / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, float]:
        """Plain numbers, for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with what `state_dict` gave."""
        self.value, self.good_steps = state["value"], int(state["good_steps"])
