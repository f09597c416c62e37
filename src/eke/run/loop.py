"""The training loop, to be read from top to bottom.

Nothing here waits for the device between two writes of metrics.jsonl: losses, norms and times are
kept on the device and read `train.log_every` steps at a time (tests/unit/run/test_no_sync.py).
"""

import logging
import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from eke.build.batches import MicroBatch
from eke.build.loss import loss_sum
from eke.record import metrics
from eke.run.checkpoint import save_checkpoint
from eke.run.failure import Diverged
from eke.run.job import Job
from eke.run.look import closer_look
from eke.run.stop import Stopped
from eke.units import format_seconds

log = logging.getLogger(__name__)

SAY_EVERY_S = 10.0
"""Seconds between two step lines in the log."""


def train(job: Job) -> None:
    """Train to the last step, evaluating, saving and writing on the way.

    Raises:
        Stopped: a signal asked for it; the checkpoint is complete.
        Diverged: a loss is not finite.
    """
    plan, settings = job.plan, job.plan.config.train
    said = time.monotonic()
    if job.start_step == 0:
        evaluate(job, 0)
    batches = job.data.train_steps(job.start_step)
    job.model.train()
    for step in range(job.start_step, plan.steps.total):
        with closer_look(job, step - job.start_step):
            train_step(job, batches, step)
        done = step + 1
        is_last = done == plan.steps.total
        stop = None if is_last else job.stop.outcome  # a run that is done is not interrupted
        eval_due = is_last or (settings.eval_every and done % settings.eval_every == 0)
        save_due = settings.checkpoint_every and done % settings.checkpoint_every == 0
        if is_last or stop or eval_due or save_due or done % settings.log_every == 0:
            rows = write_metrics(job)
            if time.monotonic() - said > SAY_EVERY_S and rows and not is_last:
                say(job, rows[-1])
                said = time.monotonic()
        if eval_due:
            evaluate(job, done)
        if settings.save_final if is_last else save_due or stop:
            save(job, done)
        if stop:
            raise Stopped(stop, f"{job.stop.signal} after step {done}; checkpoint saved")


def train_step(job: Job, batches: Iterator[list[MicroBatch]], step: int) -> None:
    """One optimizer step over all micro-batches of the global batch."""
    meter, scaler = job.meter, job.formats.scaler
    meter.enter("data")
    cut = [batch.to(job.device) for batch in next(batches)]
    # The mean over every target of the global batch: the same however the batch is cut.
    num_targets = max(1, sum(batch.num_targets for batch in cut))
    total = torch.zeros((), device=job.device)
    for batch in cut:
        meter.enter("forward")
        with job.formats.autocast():
            logits = job.model(**batch.inputs).logits
            loss = loss_sum(logits, batch.labels) / num_targets
        meter.enter("backward")
        job.accelerator.backward(scaler.scale(loss) if scaler else loss)
        total += loss.detach()
        del logits, loss
    meter.enter("optimizer")
    learning_rate = job.plan.config.optimizer.lr * job.multiplier(step)
    for group in job.optimizer.param_groups:
        group["lr"] = learning_rate
    grad_norm = clip_gradients(job)
    if scaler:
        scaler.step(job.optimizer)
        scaler.update()
    else:
        job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
    num_samples = sum(batch.num_samples for batch in cut)
    num_tokens = sum(batch.num_tokens for batch in cut)
    meter.end_step(step, total, grad_norm, learning_rate, num_samples, num_tokens)


def clip_gradients(job: Job) -> Tensor:
    """Global gradient norm before clipping; clips where that was asked for."""
    if job.formats.scaler:
        job.formats.scaler.unscale_(job.optimizer)
    gradients = [p.grad for p in job.parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if job.plan.config.train.max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(
            job.parameters, job.plan.config.train.max_grad_norm, norm
        )
    return norm


@torch.no_grad()
def evaluate(job: Job, step: int) -> None:
    """Mean loss over the evaluation samples, written as a row of its own."""
    start = time.perf_counter()
    job.meter.phase = "eval"
    job.model.eval()
    total = torch.zeros((), device=job.device)
    num_targets = 0
    for batch in job.data.eval_loader():
        moved = batch.to(job.device)
        with job.formats.autocast():
            total += loss_sum(job.model(**moved.inputs).logits, moved.labels)
        num_targets += batch.num_targets
    loss = total.item() / max(1, num_targets)
    job.model.train()
    row: metrics.Row = {
        metrics.STEP: step,
        metrics.ATTEMPT: job.attempt,
        metrics.EVAL_LOSS: loss,
    }
    said = f"step {step}/{job.plan.steps.total}  eval loss {loss:.4f}"
    if job.data.bytes_are_tokens:
        row[metrics.BITS_PER_BYTE] = loss / math.log(2)
        said += f"  ({loss / math.log(2):.3f} bits per byte)"
    metrics.append_rows(job.paths.metrics, [row])
    job.tracker.log([row])
    log.info(said)
    job.eval_s += time.perf_counter() - start


def write_metrics(job: Job) -> list[metrics.Row]:
    """Write the rows of the steps since the last write.

    Raises:
        Diverged: one of the losses is not finite, and the run is to stop then.
    """
    rows = job.meter.flush()
    metrics.append_rows(job.paths.metrics, rows)
    job.tracker.log(rows)
    if job.plan.config.train.stop_on_nonfinite:
        for row in rows:
            if not math.isfinite(row[metrics.LOSS]):
                raise Diverged(f"the loss is {row[metrics.LOSS]} at step {row[metrics.STEP]}")
    return rows


def save(job: Job, step: int) -> None:
    """Write a checkpoint."""
    start = time.perf_counter()
    job.meter.phase = "checkpoint"
    save_checkpoint(
        job.paths.checkpoints,
        step,
        job.bare_model,
        job.optimizer,
        job.formats.scaler,
        job.plan.config.train.keep_checkpoints,
    )
    job.checkpoint_s += time.perf_counter() - start


def say(job: Job, row: metrics.Row) -> None:
    """One line about the last step, for whoever reads the log."""
    step, total, seconds = row[metrics.STEP], job.plan.steps.total, row[metrics.STEP_TIME]
    log.info(
        f"step {step}/{total}  loss {row[metrics.LOSS]:.4f}  {format_seconds(seconds)}/step  "
        f"{row[metrics.TOKENS] / seconds:.0f} tokens/s  "
        f"about {format_seconds((total - step) * seconds)} left"
    )
