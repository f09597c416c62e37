"""Trying a micro-batch out: two steps of the longest samples, in processes that end with them."""

import dataclasses
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eke.common.paths import RunPaths
from eke.config.schema import Adapters, Batch, Config, Tracker
from eke.launch.processes.collect_outcome import was_killed
from eke.launch.processes.run_dir import Place
from eke.launch.processes.running_run import LiveRun
from eke.launch.processes.worker_process import forward_signals
from eke.plan.planner import Plan, replan
from eke.plan.record import Outcome, Record

LIMIT_S = 900.0
"""For one probe, after which it is ended: compiling takes the longest, minutes for large models."""

POLL_S = 0.05
"""Between two looks at the processes."""

STEPS = 2
"""The optimizer's states are made in the first step, and lie beside activations in the second."""


@dataclass(frozen=True)
class Probed:
    """How a probe ended."""

    fits: bool | None
    """None where it ended for another reason than memory."""
    reason: str = ""
    """Why it did not fit, or what else went wrong, in one line."""


Start = Callable[[Plan, Place], LiveRun]


def start_here(plan: Plan, place: Place) -> LiveRun:
    """Start the processes of a plan on whatever devices they see."""
    return LiveRun(plan, place, plan.batch.world_size)


def probe(plan: Plan, start: Start = start_here) -> Probed:
    """Run the trial of a plan on this machine, with all its processes, and clean up behind it.

    Args:
        plan: of the run, with the micro-batch in question.
        start: starts its processes.

    Raises:
        KeyboardInterrupt: a signal asked to stop; no process is left.
        RunError: the folder for temporary files cannot be written.
    """
    running: list[LiveRun] = []

    def kill(_: int = 0) -> None:
        for live in running:
            live.kill()

    with (
        tempfile.TemporaryDirectory(prefix="eke-probe-", ignore_cleanup_errors=True) as folder,
        forward_signals(kill, kill, "stopping the probe") as heard,
    ):
        paths = RunPaths(Path(folder) / "run")
        live = start(trial_of(plan), Place(paths, None, ""))
        running.append(live)
        deadline = time.monotonic() + LIMIT_S
        while not (live.is_over() or heard or time.monotonic() > deadline):
            time.sleep(POLL_S)
        too_long = not live.is_over() and not heard
        record = live.finish()
        found = _judged(record, paths, live.worker.process.wait())
    if heard:
        raise KeyboardInterrupt
    return Probed(None, f"it took longer than {LIMIT_S:.0f} s") if too_long else found


def trial_of(plan: Plan) -> Plan:
    """The plan of the trial: nothing is saved, sent or read.

    Of several accumulated micro-batches two are enough: the gradients of the first are there when
    the second is computed.
    """
    config = plan.config
    batch = Batch(
        per_device=plan.batch.per_device,
        accumulation=min(plan.batch.accumulation, 2),
        eval_per_device=plan.batch.eval_per_device,
    )
    train = dataclasses.replace(
        config.train,
        eval_every=None,
        checkpoint_every=None,
        save_final=False,
        stop_on_nonfinite=False,
    )
    cut = replan(plan, _unsaved(dataclasses.replace(config, batch=batch, train=train)))
    shape = cut.batch
    evaluated = shape.eval_per_device * shape.world_size * shape.devices
    steps = dataclasses.replace(
        plan.steps,
        total=STEPS,
        per_epoch=STEPS,
        warmup=0,
        num_train_samples=STEPS * shape.samples_per_step,
        num_eval_samples=min(evaluated, plan.steps.num_eval_samples),
    )
    return dataclasses.replace(cut, steps=steps, probe=True)


def _unsaved(config: Config) -> Config:
    """Without a tracker, and without a merged model at the end."""
    peft = config.peft
    if isinstance(peft, Adapters):
        peft = dataclasses.replace(peft, save_merged=False)
    return dataclasses.replace(config, peft=peft, tracker=Tracker(option="none"))


def _judged(record: Record, paths: RunPaths, exit_code: int) -> Probed:
    """What the record of a trial says of memory.

    A process that SIGKILL ended ran out of it, too: nobody else knows of these processes, and the
    kernel ends them first when the machine's memory is short.
    """
    reason, phase = record.outcome, ""
    if record.failure:
        reason, phase = record.failure.message, f" in {record.failure.phase}"
    if record.outcome == Outcome.ok.name:
        return Probed(True)
    if record.outcome == Outcome.oom.name:
        return Probed(False, f"out of memory{phase}")
    killed = was_killed(paths, record.attempt, exit_code)
    return Probed(False if killed else None, reason)
