"""A trial: a short run of one candidate, and what its record says."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eke.plan.record import Outcome, Record
from eke.tuning.search.search_space import Trial

WARMUP_STEPS, MEASURED_STEPS = 5, 15
"""Of a trial. DeepSpeed's autotuner profiles 3 to 5; the spread of 15 is recorded, so that
the search knows what they do not resolve."""

HIGHER = 0.01
"""By how much a candidate's loss may be above that of what was typed, after the same samples."""

SHORT = (
    f"train.steps={WARMUP_STEPS + MEASURED_STEPS}",
    "train.epochs=null",
    f"train.timing_warmup_steps={WARMUP_STEPS}",
    "train.eval_every=null",
    "train.checkpoint_every=null",
    "train.save_final=false",
    "schedule.warmup_steps=0",
)
"""What makes a run a trial: nothing of it touches what a step costs."""

NOT_OF_A_RUN = ("rerun", "repeat", "plan_only", "ignore_forecast")
"""Keys that say nothing of a configuration."""

PER_NORMAL = 2 * 1.2816
"""Standard deviations between the 10th and the 90th percentile of a normal distribution."""

OF_MEDIAN = math.sqrt(math.pi / 2)
"""A median's standard error over a mean's (normal distribution, many values)."""


@dataclass(frozen=True)
class Measured:
    """A trial's record, as far as a search and a reader want to know it."""

    number: int
    """Of the candidate."""
    repeat: int
    """0 for its first trial."""
    trial: Trial
    outcome: str
    reason: str = ""
    """Why there is no step time, or why it does not count."""
    steady_s: float | None = None
    """Seconds per optimizer step, without compiling."""
    compile_s: float = 0.0
    loss: float | None = None
    """Nats per target after the trial."""
    data_frac: float | None = None
    """Share of a step that waits for data."""
    shared: bool = False
    """Another process used the device meanwhile."""
    folder: str = ""


def trial_overrides(typed: Sequence[str], candidate: Sequence[str], repeat: int) -> tuple[str, ...]:
    """What is typed for a trial.

    Args:
        typed: by the user.
        candidate: what makes the candidate of it.
        repeat: 0 for the first trial of a candidate.
    """
    again = (f"repeat={repeat}",) if repeat else ()
    return (*without(typed, (*candidate, *SHORT)), *candidate, *SHORT, *again)


def without(typed: Sequence[str], changed: Sequence[str]) -> list[str]:
    """What was typed, but for what is typed anew and for what concerns no configuration."""
    gone = {*map(_key, changed), *NOT_OF_A_RUN}
    kept = [text for text in typed if _key(text) not in gone]
    return [text for text in kept if text != "batch=auto"]


def _key(text: str) -> str:
    return text.lstrip("+").partition("=")[0]


def measured(
    number: int,
    repeat: int,
    record: Record,
    folder: str,
    total_steps: int,
    on_gpu: bool,
    context_bytes: int = 0,
) -> Measured:
    """What a trial's record says.

    Args:
        number: of the candidate.
        repeat: of its trial.
        record: of the trial.
        folder: of the trial.
        total_steps: of the run that the search is for: what compiling costs is spread over them.
        on_gpu: whether peaks are of the GPU's allocator, segments included.
        context_bytes: what the driver keeps beside the allocator, which a forecast counts as well.
    """
    memory = record.memory.measured
    peak = None
    if memory is not None:
        peak = memory.peak_reserved_bytes if on_gpu else memory.peak_allocated_bytes
        peak = None if peak is None else peak + context_bytes
    spread, compile_s = record.timing.steady_step_s, record.timing.compile_s or 0.0
    failed = record.outcome != Outcome.ok.name or spread is None
    trial = Trial(None, peak_bytes=peak, ran_out=record.outcome == Outcome.oom.name)
    if not failed:
        assert spread is not None
        relative = (spread.p90 - spread.p10) / PER_NORMAL / spread.median
        error = OF_MEDIAN * relative / math.sqrt(spread.n)
        share = compile_s / total_steps
        trial = Trial(spread.median + share, error, share, peak)
    loss = record.loss.eval_final
    return Measured(
        number,
        repeat,
        trial,
        record.outcome,
        record.failure.message if record.failure else "",
        spread.median if spread else None,
        compile_s,
        record.loss.train_final if loss is None else loss,
        record.timing.data_frac,
        bool(record.shared_device),
        folder,
    )


def is_higher(loss: float | None, typed: float | None) -> bool:
    """Whether a loss is above that of what was typed by more than rounding explains."""
    return loss is not None and typed is not None and loss > typed * (1 + HIGHER)
