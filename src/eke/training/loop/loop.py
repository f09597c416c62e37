"""The training loop, which reads losses from the device only every `train.log_every` steps."""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch

from eke.common.errors import RunError
from eke.common.text import format_seconds
from eke.plan.record import IN_LOG, metrics
from eke.training.batches.batches import MicroBatch
from eke.training.custom import is_plain
from eke.training.custom.checks import check_division, check_hidden_state, hidden_state
from eke.training.distributed.fsdp import local_tensor
from eke.training.distributed.ranks import StepTotals
from eke.training.loop.evaluation import best_so_far, is_exhausted, measure, note_evaluation
from eke.training.loop.failure import Diverged
from eke.training.loop.meter import capture_random_state, restore_random_state
from eke.training.loop.saving import await_copy, finish_saving, progress, save
from eke.training.loop.step import take_step
from eke.training.loop.stop import Interrupted, Stopped
from eke.training.loop.training_state import TrainingState
from eke.training.observe.observe_run import look_at_evaluation, profile_step
from eke.training.optimizer.build_optimizer import evaluation_weights
from eke.training.optimizer.update import PlainUpdate, set_learning_rate

_log = logging.getLogger(__name__)

_SAY_EVERY_S = 10.0
"""Seconds between step lines in the log."""

_SAVED = "checkpoint saved"
_UNSAVED = "no checkpoint saved (train.save_on_signal=false)"


def train(job: TrainingState) -> None:
    """Train to the last step, with evaluations, checkpoints and metrics.

    Raises Stopped after a signal, when the checkpoint, if one is due, is complete. Diverged: A loss
    is not finite. RunError: The chosen attention kernel does not support the inputs.
    """
    check_division(job)
    between = BetweenSteps(job)
    if job.start_step == 0:
        evaluate_at(job, 0)
    batches = job.data.train_steps(job.start_step, job.ranks.rank, job.update.even)
    job.model.train()
    call, per_epoch = job.callbacks.call, job.plan.steps.per_epoch
    step = job.start_step - 1
    call("on_train_begin", job.start_step)
    before = hidden_state(job.bare_model) if is_plain(job.bare_model) else {}
    for step in range(job.start_step, job.plan.steps.total):
        if step % per_epoch == 0:
            call("on_epoch_begin", step)
        call("on_step_begin", step)
        try:
            with profile_step(job, step - job.start_step):
                totals = train_step(job, batches, step)
        except Interrupted:
            between.give_up(step)
        if step == job.start_step and before:
            check_hidden_state(job, before)
        call("on_step_end", step + 1)
        if (step + 1) % per_epoch == 0:
            call("on_epoch_end", step + 1)
        between.finish(step, totals)
        if between.is_over:
            break
    call("on_train_end", step + 1)


class BetweenSteps:
    """Actions after each optimizer step: write metrics, evaluate, save, stop."""

    def __init__(self, job: TrainingState) -> None:
        self.job = job
        job.meter.sources = tuple(source.name for source in job.plan.sources)
        self.said = time.monotonic()
        self.is_over = False
        """True if early stopping has ended training."""
        settings = job.plan.config.train
        if job.start_step and (settings.early_stop_patience or settings.keep_best):
            rows, _ = metrics.read_rows(job.paths.metrics) if job.ranks.is_main else ([], 0)
            found = metrics.latest(rows, metrics.EVAL_LOSS)
            before = [row for row in found if row[metrics.STEP] <= job.start_step]
            job.evaluations = job.ranks.tell(before)  # all ranks must decide alike

    def finish(self, step: int, totals: StepTotals) -> None:
        """Do the actions that are due after this step, counted from 0. Raises like `train`."""
        job, settings = self.job, self.job.plan.config.train
        done = step + 1
        ends, saves_now, evaluates = job.callbacks.requests()
        is_last = done == job.plan.steps.total
        if totals.saved >= job.ranks.world_size:
            finish_saving(job)
        # A single process stops after this step. Ranks stop after the step in whose totals they
        # agreed.
        requested = job.stop.outcome if job.ranks.world_size == 1 else totals.stop
        stop = None if is_last else requested  # finished training is not interrupted
        eval_due = is_last or (settings.eval_every and done % settings.eval_every == 0)
        eval_due = eval_due or ends or evaluates
        save_due = settings.checkpoint_every and done % settings.checkpoint_every == 0
        save_due = save_due or saves_now
        if is_last or stop or eval_due or save_due or done % settings.log_every == 0:
            rows = write_metrics(job)
            if time.monotonic() - self.said > _SAY_EVERY_S and rows and not is_last:
                _log_step(job, rows[-1])
                self.said = time.monotonic()
        if eval_due:
            evaluate_at(job, done)
            wants, saves_now, _ = job.callbacks.requests()
            ends, save_due = ends or wants, save_due or saves_now
            self.is_over = not is_last and (is_exhausted(job) or ends)
            if ends:
                job.effective["callback_stop"] = done
            is_last = is_last or self.is_over
        best = best_so_far(job)
        is_best = best is not None and best.step == done
        on_signal = stop and settings.save_on_signal
        saves = is_best or (settings.save_final if is_last else save_due or on_signal)
        if saves:
            save(job, done, exports=is_best or is_last)
            job.callbacks.call("on_save", done)
        if is_last or stop:
            finish_saving(job)
        if stop and not self.is_over:
            who = job.stop.signal or "another process"
            raise Stopped(stop, f"{who} after step {done}; {_SAVED if saves else _UNSAVED}")

    def give_up(self, step: int) -> NoReturn:
        """Discard an unfinished step, counted from 0, and save the earlier ones if configured."""
        job = self.job
        write_metrics(job)
        saved = "no new steps to save" if job.plan.config.train.save_on_signal else _UNSAVED
        if job.plan.config.train.save_on_signal and step > job.start_step:
            assert job.before_step is not None, "only a step that can be abandoned is interrupted"
            restore_random_state(job.before_step)
            save(job, step)  # complete on return, because there is one process
            saved = _SAVED
        assert job.stop.outcome is not None
        raise Stopped(job.stop.outcome, f"{job.stop.signal} after step {step}; {saved}")


def _stops_within(job: TrainingState) -> bool:
    """Return whether a step can be abandoned: several processes would have to agree each time."""
    alone = job.ranks.world_size == 1 and job.plan.deepspeed is None
    return alone and job.plan.batch.accumulation > 1


def enter(job: TrainingState, phase: str) -> None:
    """Begin a phase of the step. Raises Interrupted if a signal arrived between micro-batches."""
    if phase == "forward" and job.stop.outcome is not None and _stops_within(job):
        raise Interrupted
    if phase == "optimizer":
        await_copy(job)
    job.meter.enter(phase)


def train_step(job: TrainingState, batches: Iterator[list[MicroBatch]], step: int) -> StepTotals:
    """Take one optimizer step over the global batch and return its totals."""
    cut, totals = next_step(job, batches)
    rate = job.plan.config.optimizer.lr * job.multiplier(step)
    set_learning_rate(job.optimizer, rate)  # an update may already step in the backward pass
    exact, passes = totals, 0

    def begin(phase: str) -> None:
        nonlocal exact, passes
        passes += phase == "forward"
        if phase == "forward" and passes > 1:
            job.callbacks.call("on_substep_end", step)
        enter(job, phase)
        if phase == "optimizer":
            exact = count_exactly(job, totals)
            job.callbacks.call("on_pre_optimizer_step", step)

    total, grad_norm = take_step(job, cut, totals.num_targets, step, begin)
    job.callbacks.call("on_optimizer_step", step)
    job.meter.end_step(step, total, grad_norm, rate, exact)
    return exact


def count_exactly(job: TrainingState, totals: StepTotals) -> StepTotals:
    """Divide the gradients by the count that own code returned with its loss, if any. Collective.

    RunError: It differs from `loss.per`, and the gradients have been used already.
    """
    counts = getattr(job.loss, "counts", None)
    if counts is None:
        return totals
    mine = torch.stack([torch.zeros((), dtype=torch.float64, device=job.device), *counts]).sum()
    counts.clear()
    count = job.ranks.sum(mine).item()
    if count == totals.num_targets or count <= 0:
        return totals
    if not isinstance(job.update, PlainUpdate):
        raise RunError(
            f"loss = custom: it counts {count:g}, and loss.per {totals.num_targets}. Gradients "
            "were divided by the second -> loss.per=KEY with the same count"
        )
    found = [local_tensor(p.grad) for p in job.parameters if p.grad is not None]
    torch._foreach_mul_(found, totals.num_targets / count)
    return replace(totals, num_targets=count)


def next_step(
    job: TrainingState, batches: Iterator[list[MicroBatch]]
) -> tuple[list[MicroBatch], StepTotals]:
    """Return this rank's next micro-batches, on the device, and the totals of all ranks."""
    job.before_step = capture_random_state() if _stops_within(job) else None
    job.meter.enter("data")
    # A rank without samples in an epoch's short last step still joins the gradient exchange.
    made = next(batches) or job.data.placeholders(1)
    job.largest = max((batch.size for batch in made), key=lambda size: size.tokens)
    cut = [job.transfer(batch) for batch in made]
    counts = map(sum, zip(*[batch.counts for batch in cut], strict=True))
    return cut, job.ranks.totals(counts, job.stop.outcome, progress(job))


def evaluate_at(job: TrainingState, step: int) -> None:
    """Evaluate the model and write loss and metrics as a row."""
    start = time.perf_counter()
    job.meter.leave("eval")
    with evaluation_weights(job.optimizer):
        row, classes = measure(job, job.update.even, partial(look_at_evaluation, job))
    note_evaluation(job, step, row, classes)
    job.callbacks.call("on_evaluate", step, metrics=row)
    job.eval_s += time.perf_counter() - start
    # Check only the last loss: an earlier one may have overflowed in its own number format.
    is_last, loss = step == job.plan.steps.total, row[metrics.EVAL_LOSS]
    if is_last and job.plan.config.train.stop_on_nonfinite and not math.isfinite(loss):
        raise Diverged(f"the evaluation loss is {loss} at the last step, {step}")


def write_metrics(job: TrainingState) -> list[metrics.Row]:
    """Write the rows of the steps since the last write from rank 0. Collective."""
    rows = job.meter.flush(job.ranks)
    if job.ranks.is_main:
        metrics.append_rows(job.paths.metrics, rows)
        job.tracker.log(rows)
        for row in rows:
            job.callbacks.call("on_log", int(row[metrics.STEP]), logs=row)
    if job.plan.config.train.stop_on_nonfinite:
        for row in rows:
            if not math.isfinite(row[metrics.LOSS]):
                raise Diverged(f"the loss is {row[metrics.LOSS]} at step {row[metrics.STEP]}")
    return rows


def _log_step(job: TrainingState, row: metrics.Row) -> None:
    step, total, seconds = row[metrics.STEP], job.plan.steps.total, row[metrics.STEP_TIME]
    unit = "tokens" if row[metrics.TOKENS] else "samples"
    _log.info(
        f"step {step}/{total}  loss {row[metrics.LOSS]:.4f}  {format_seconds(seconds)}/step  "
        f"{(row[metrics.TOKENS] or row[metrics.SAMPLES]) / seconds:.0f} {unit}/s  "
        f"about {format_seconds((total - step) * seconds)} left",
        extra={"prefix": IN_LOG},  # shown from the metrics
    )
