"""Evaluation: loss and metrics of the evaluation samples, best evaluation, early stopping."""

import logging
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from eke.plan.record import IN_LOG, Best, metrics
from eke.training.batches.batches import MicroBatch
from eke.training.batches.tasks import class_names
from eke.training.custom.metrics import OwnMetrics
from eke.training.custom.outputs import has_own_loss, logits_of
from eke.training.loop.classification import Predictions, classification_metrics
from eke.training.loop.step import add_evaluation
from eke.training.loop.training_state import TrainingState
from eke.training.model.loss import build_loss, loss_head

_log = logging.getLogger(__name__)


@dataclass
class _TokenAccuracy:
    """Count of correctly predicted targets, for models that return all logits."""

    correct: Tensor
    """Correct targets so far, int64 on the device."""

    def add(self, output: Any, batch: MicroBatch) -> None:
        """Count correct targets of a micro-batch."""
        self.correct += (logits_of(output).argmax(-1) == batch.labels).sum()


@torch.no_grad()
def measure(
    job: TrainingState,
    even: bool = False,
    look: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[metrics.Row, dict[str, Any]]:
    """Return metrics of the evaluation samples and of each class. `look` surrounds each batch."""
    copies, own = job.plan.ranks.is_dp, OwnMetrics(job.plan, job.ranks, job.warn)
    is_classifier = not (job.plan.targets.per_token or job.plan.targets.option == "custom")
    predictions = Predictions() if is_classifier else None
    names = [source.name for source in job.plan.sources]
    # Sums stay on the device during the loop: reading one would wait for each batch.
    totals = torch.zeros(1 + len(names), device=job.device)
    targets = torch.zeros(len(totals), dtype=torch.float64)
    tokens = None
    if not (is_classifier or copies or has_own_loss(job.plan) or loss_head(job.bare_model)):
        tokens = _TokenAccuracy(torch.zeros((), dtype=torch.int64, device=job.device))
    observers = [each for each in (predictions, tokens, own) if each]
    # The copies of `distributed=dp` return no output.
    whole = (job.bare_model, build_loss(job.plan, job.bare_model)) if copies else (job.model, None)
    own.reset()
    job.model.eval()
    for batch in job.data.eval_batches(job.ranks.rank, even or bool(own)):
        moved = job.transfer(batch)
        with look():
            output = add_evaluation(job, moved, totals, *(whole if observers else ()))
        with torch.no_grad():
            for each in observers:
                each.add(output, moved)
        targets += torch.tensor([batch.num_targets, *batch.targets_of])
    job.model.train()
    if own_counts := getattr(job.loss, "counts", None):
        targets[0] = torch.stack(own_counts).sum()
        own_counts.clear()
    (loss, *sums), (counted, *counts) = (job.ranks.sum(x).tolist() for x in (totals, targets))
    counted = counted or 1.0
    row = row_of_loss(job, loss / counted) | own.compute()
    known = zip(names, sums, counts, strict=True)
    row |= {f"{metrics.EVAL_LOSS}/{name}": part / n for name, part, n in known if n}
    classes: dict[str, Any] = {}
    if predictions is not None:
        named = getattr(getattr(job.bare_model, "config", None), "id2label", None)
        labels = list(named.values()) if named else list(class_names(job.plan))
        labels = labels or list(map(str, range(job.plan.targets.num_labels)))
        values, classes = classification_metrics(*predictions.gather(job.ranks), labels)
        row |= values
    if tokens is not None:
        row[metrics.TOKEN_ACCURACY] = job.ranks.sum(tokens.correct).item() / counted
    return row, classes


def row_of_loss(job: TrainingState, loss: float) -> metrics.Row:
    """Return a row with the loss, and with perplexity and bits per byte if they are defined."""
    row: metrics.Row = {metrics.EVAL_LOSS: loss}
    if has_own_loss(job.plan):
        return row
    if job.data.bytes_are_tokens:
        row[metrics.BITS_PER_BYTE] = loss / math.log(2)
    if job.plan.targets.per_token and loss < math.log(sys.float_info.max):
        row[metrics.PERPLEXITY] = math.exp(loss)
    return row


def note_evaluation(
    job: TrainingState, step: int, row: metrics.Row, classes: dict[str, Any]
) -> None:
    """Keep an evaluation for later decisions and write it as a row."""
    row = {metrics.STEP: step, metrics.ATTEMPT: job.attempt, **row}
    job.evaluations.append(row)
    best = best_so_far(job)
    if best is None or best.step == step:
        job.classes = classes
    if not job.ranks.is_main:
        return
    metrics.append_rows(job.paths.metrics, [row])
    job.tracker.log([row])
    line = f"step {step}/{job.plan.steps.total}  eval loss {row[metrics.EVAL_LOSS]:.4f}"
    if metrics.BITS_PER_BYTE in row:
        line += f"  ({row[metrics.BITS_PER_BYTE]:.3f} bits per byte)"
    names = {"accuracy": "accuracy", "f1_macro": "macro F1", "mae": "mean absolute error"}
    shown = [f"  {text} {row[k]:.4f}" for n, text in names.items() if (k := f"eval/{n}") in row]
    _log.info("".join([line, *shown]), extra={"prefix": IN_LOG})  # shown from the metrics


def best_so_far(job: TrainingState) -> Best | None:
    """Return the evaluation whose weights become the model, None without `train.keep_best`."""
    return metrics.best_evaluation(job.evaluations, job.plan.config.train.keep_best)


def is_exhausted(job: TrainingState) -> bool:
    """Return whether the last `train.early_stop_patience` evaluations brought no improvement."""
    patience = job.plan.config.train.early_stop_patience
    metric, first = job.plan.config.train.keep_best or "loss", job.evaluations[0]
    none = Best(metric, first[metrics.STEP], first.get(f"eval/{metric}", math.nan))
    best = metrics.best_evaluation(job.evaluations, metric, first=0) or none
    later = sum(row[metrics.STEP] > best.step for row in job.evaluations)
    if patience is None or later < patience:
        return False
    job.effective["early_stop"] = {**asdict(best), "patience": patience}
    _log.info(f"early stop: best {metric} {best.value:.4f} at step {best.step}")
    return True
