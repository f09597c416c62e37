"""The training loop, to be read from top to bottom.

Nothing here waits for the device between two writes of metrics.jsonl: losses, norms and times are
kept on the device and read `train.log_every` steps at a time
(tests/unit/training/loop/test_no_sync.py).
"""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

import torch

from eke.common.files import replace_link
from eke.common.paths import RunPaths
from eke.common.text import format_seconds
from eke.models.families import is_classification
from eke.plan.record import metrics
from eke.training.batches.batches import MicroBatch
from eke.training.checkpoint import save_checkpoint, save_parts
from eke.training.distributed.deepspeed_engine import DeepSpeedUpdate
from eke.training.distributed.ranks import StepTotals
from eke.training.loop.classification import Predictions, classification_metrics
from eke.training.loop.failure import Diverged
from eke.training.loop.meter import capture_random_state, restore_random_state
from eke.training.loop.step import add_evaluation, take_step
from eke.training.loop.stop import Interrupted, Stopped
from eke.training.loop.training_state import TrainingState
from eke.training.observe.effective import closer_look, look_at_evaluation
from eke.training.optimizer.build_optimizer import evaluation_weights
from eke.training.optimizer.update import set_learning_rate

log = logging.getLogger(__name__)

SAY_EVERY_S = 10.0
"""Seconds between step lines in the log."""


def train(job: TrainingState) -> None:
    """Train to the last step, evaluating, saving and writing on the way.

    Raises:
        Stopped: after a signal; the checkpoint is complete.
        Diverged: a loss is not finite.
        RunError: the requested attention kernel does not support this model's inputs.
    """
    between = BetweenSteps(job)
    if job.start_step == 0:
        evaluate(job, 0)
    batches = job.data.train_steps(job.start_step, job.ranks.rank, job.update.even)
    job.model.train()
    for step in range(job.start_step, job.plan.steps.total):
        try:
            with closer_look(job, step - job.start_step):
                totals = train_step(job, batches, step)
        except Interrupted:
            between.give_up(step)
        between.finish(step, totals)
        if between.is_over:
            break


class BetweenSteps:
    """Actions after each optimizer step: write metrics, evaluate, save, stop."""

    def __init__(self, job: TrainingState) -> None:
        self.job = job
        job.meter.sources = tuple(source.name for source in job.plan.sources)
        self.said = time.monotonic()
        self.is_over = False
        """The evaluation loss was not lowered for as long as the plan has patience."""
        if job.start_step and job.plan.config.train.early_stop_patience is not None:
            rows, _ = metrics.read_rows(job.paths.metrics)
            job.eval_losses = [
                (row[metrics.STEP], row[metrics.EVAL_LOSS])
                for row in metrics.latest(rows, metrics.EVAL_LOSS)
                if row[metrics.STEP] <= job.start_step
            ]

    def finish(self, step: int, totals: StepTotals) -> None:
        """Do what is due after this step, counted from 0.

        Raises:
            Stopped: after a signal; the checkpoint is complete.
            Diverged: a loss is not finite.
        """
        job, settings = self.job, self.job.plan.config.train
        done = step + 1
        is_last = done == job.plan.steps.total
        # Alone, stop after this step; ranks stop after the step before which they knew of it.
        asked = job.stop.outcome if job.ranks.world_size == 1 else totals.stop
        stop = None if is_last else asked  # what is done is not interrupted
        eval_due = is_last or (settings.eval_every and done % settings.eval_every == 0)
        save_due = settings.checkpoint_every and done % settings.checkpoint_every == 0
        if is_last or stop or eval_due or save_due or done % settings.log_every == 0:
            rows = write_metrics(job)
            if time.monotonic() - self.said > SAY_EVERY_S and rows and not is_last:
                _log_step(job, rows[-1])
                self.said = time.monotonic()
        if eval_due:
            evaluate(job, done)
            self.is_over = not is_last and is_exhausted(job)
            is_last = is_last or self.is_over
        if settings.save_final if is_last else save_due or stop:
            save(job, done)
        if stop and not self.is_over:
            who = job.stop.signal or "another process"
            raise Stopped(stop, f"{who} after step {done}; checkpoint saved")

    def give_up(self, step: int) -> NoReturn:
        """Discard an unfinished step, counted from 0.

        Raises:
            Stopped: always; what was done before is saved.
        """
        job = self.job
        write_metrics(job)
        saved = "nothing new to save"
        if step > job.start_step:
            assert job.before_step is not None, "only such a step is interrupted"
            restore_random_state(job.before_step)
            save(job, step)
            saved = "checkpoint saved"
        assert job.stop.outcome is not None
        raise Stopped(job.stop.outcome, f"{job.stop.signal} after step {step}; {saved}")


def stops_within(job: TrainingState) -> bool:
    """Whether a step may be given up: several processes would have to agree on it in each part."""
    alone = job.ranks.world_size == 1 and job.plan.deepspeed is None
    return alone and job.plan.batch.accumulation > 1


def enter(job: TrainingState, phase: str) -> None:
    """A phase of the step begins.

    Raises:
        Interrupted: a signal arrived between micro-batches.
    """
    if phase == "forward" and job.stop.outcome is not None and stops_within(job):
        raise Interrupted
    job.meter.enter(phase)


def train_step(job: TrainingState, batches: Iterator[list[MicroBatch]], step: int) -> StepTotals:
    """One optimizer step over all micro-batches of the global batch; returns what it held."""
    cut, totals = next_step(job, batches)
    # The mean over every target of the global batch: the same however the batch is cut.
    num_targets = max(1, totals.num_targets)
    # Before the backward pass: an update may step within it.
    learning_rate = job.plan.config.optimizer.lr * job.multiplier(step)
    set_learning_rate(job.optimizer, learning_rate)
    total, grad_norm = take_step(job, cut, num_targets, step, learning_rate, partial(enter, job))
    job.meter.end_step(step, total, grad_norm, learning_rate, totals)
    return totals


def next_step(
    job: TrainingState, batches: Iterator[list[MicroBatch]]
) -> tuple[list[MicroBatch], StepTotals]:
    """This rank's micro-batches of the next step, on the device, and what all ranks hold."""
    job.before_step = capture_random_state() if stops_within(job) else None
    job.meter.enter("data")
    # A rank without samples in an epoch's last, short step still takes part in the exchange.
    made = next(batches) or job.data.placeholders(1)
    job.largest = max((batch.size for batch in made), key=lambda size: size.tokens)
    cut = [job.transfer(batch) for batch in made]
    mine = StepTotals(
        sum(batch.num_targets for batch in cut),
        sum(batch.num_samples for batch in cut),
        sum(batch.num_tokens for batch in cut),
        job.stop.outcome,
        tuple(map(sum, zip(*(batch.samples_of for batch in cut), strict=True))),
    )
    return cut, job.ranks.totals(mine)


@torch.no_grad()
def evaluate(job: TrainingState, step: int) -> None:
    """Compute the mean loss over the evaluation samples, and write it as a row.

    Raises:
        Diverged: the last one is not finite. An earlier one may have overflowed in its own format.
    """
    start = time.perf_counter()
    job.meter.phase = "eval"
    job.model.eval()
    names = [source.name for source in job.plan.sources]
    totals = torch.zeros(len(names) or 1, device=job.device)
    targets = torch.zeros(len(totals), dtype=torch.int64)
    copies = job.plan.config.distributed.option == "dp"
    is_classifier = is_classification(job.plan.config)
    predictions = Predictions(job.bare_model if copies else job.model) if is_classifier else None
    with evaluation_weights(job.optimizer):
        for batch in job.data.eval_batches(job.ranks.rank, job.update.even):
            moved = job.transfer(batch)
            with look_at_evaluation(job):
                add = add_evaluation if predictions is None else predictions.add_evaluation
                add(job, moved, totals[batch.source])
            targets[batch.source] += batch.num_targets
    sums, counts = (job.ranks.sum(each).tolist() for each in (totals, targets))
    loss = sum(sums) / max(1, sum(counts))
    known = zip(names, sums, counts, strict=False)
    each = {f"{metrics.EVAL_LOSS}/{name}": part / n for name, part, n in known if n}
    pairs = None if predictions is None else predictions.gather(job.ranks)
    job.model.train()
    job.eval_losses.append((step, loss))
    if job.ranks.is_main:
        note_evaluation(job, step, loss, pairs, each)
    job.eval_s += time.perf_counter() - start
    is_last = step == job.plan.steps.total
    if is_last and job.plan.config.train.stop_on_nonfinite and not math.isfinite(loss):
        raise Diverged(f"the evaluation loss is {loss} at step {step}, the last one")


def is_exhausted(job: TrainingState) -> bool:
    """Whether the last evaluations, `train.early_stop_patience` of them, brought no lower loss."""
    patience = job.plan.config.train.early_stop_patience
    if patience is None:
        return False
    losses = [math.inf if math.isnan(loss) else loss for _, loss in job.eval_losses]
    best = losses.index(min(losses))
    if len(losses) - 1 - best < patience:
        return False
    step, loss = job.eval_losses[best]
    job.effective["early_stop"] = {"best_step": step, "best_loss": loss, "patience": patience}
    log.info(f"ends early: the evaluation loss was lowest at step {step} ({loss:.4f})")
    return True


def note_evaluation(
    job: TrainingState,
    step: int,
    loss: float,
    pairs: tuple[list[int], list[int]] | None = None,
    of_sources: metrics.Row | None = None,
) -> None:
    """Write the row of one evaluation; pairs: predicted and right classes of a classifier."""
    row: metrics.Row = {
        metrics.STEP: step,
        metrics.ATTEMPT: job.attempt,
        metrics.EVAL_LOSS: loss,
        **(of_sources or {}),
    }
    said = f"step {step}/{job.plan.steps.total}  eval loss {loss:.4f}"
    if job.data.bytes_are_tokens:
        row[metrics.BITS_PER_BYTE] = loss / math.log(2)
        said += f"  ({loss / math.log(2):.3f} bits per byte)"
    if pairs is not None:
        config: Any = job.bare_model.config
        values, job.classes = classification_metrics(*pairs, list(config.id2label.values()))
        row |= values
        said += f"  accuracy {row['eval/accuracy']:.4f}  macro F1 {row['eval/f1_macro']:.4f}"
    elif loss < math.log(sys.float_info.max):
        row[metrics.PERPLEXITY] = math.exp(loss)
    metrics.append_rows(job.paths.metrics, [row])
    job.tracker.log([row])
    log.info(said)


def write_metrics(job: TrainingState) -> list[metrics.Row]:
    """Write the rows of the steps since the last write; all ranks take part, rank 0 writes.

    Raises:
        Diverged: one of the losses is not finite, and the run is to stop then.
    """
    rows = job.meter.flush(job.ranks)
    if job.ranks.is_main:
        metrics.append_rows(job.paths.metrics, rows)
        job.tracker.log(rows)
    if job.plan.config.train.stop_on_nonfinite:
        for row in rows:
            if not math.isfinite(row[metrics.LOSS]):
                raise Diverged(f"the loss is {row[metrics.LOSS]} at step {row[metrics.STEP]}")
    return rows


def save(job: TrainingState, step: int) -> None:
    """Write a checkpoint: rank 0 with the random states of all, or each rank its own part."""
    start = time.perf_counter()
    job.meter.phase = "checkpoint"
    folder, keep = job.paths.checkpoints, job.plan.config.train.keep_checkpoints
    if isinstance(job.update, DeepSpeedUpdate):
        save_parts(folder, step, job.bare_model, job.update, keep, job.ranks, job.tokenizer)
    else:  # rank 0 has all there is to save, but for the other ranks' random states
        random_states = job.ranks.gather(capture_random_state())
        whole = job.update.gather(keep=job.ranks.is_main)
        if job.ranks.is_main:
            save_checkpoint(
                folder,
                step,
                job.bare_model,
                job.optimizer,
                job.formats.scaler,
                keep,
                random_states,
                job.tokenizer,
                whole,
            )
    if job.ranks.is_main:
        link_model(job.paths, step)
    job.checkpoint_s += time.perf_counter() - start


def link_model(paths: RunPaths, step: int) -> None:
    """`model` in the run folder is the newest export: a name to load that stays the same."""
    target = str(paths.exported(step).relative_to(paths.folder))
    with contextlib.suppress(OSError):  # a file system without links: the folder has a name, too
        if not paths.model.exists() or paths.model.is_symlink():
            replace_link(paths.model, target)


def _log_step(job: TrainingState, row: metrics.Row) -> None:
    step, total, seconds = row[metrics.STEP], job.plan.steps.total, row[metrics.STEP_TIME]
    log.info(
        f"step {step}/{total}  loss {row[metrics.LOSS]:.4f}  {format_seconds(seconds)}/step  "
        f"{row[metrics.TOKENS] / seconds:.0f} tokens/s  "
        f"about {format_seconds((total - step) * seconds)} left"
    )
