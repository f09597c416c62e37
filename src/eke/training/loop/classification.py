"""Evaluation of a classifier: its loss, and metrics of its predictions by scikit-learn."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from eke.common.text import IGNORED
from eke.plan.record import metrics
from eke.training.batches.batches import MicroBatch
from eke.training.distributed.ranks import Ranks
from eke.training.loop.step import Answering
from eke.training.model.loss import loss_sum

MOST_IN_MATRIX = 100
"""Classes up to which the record holds a confusion matrix: 10,000 numbers."""


@dataclass
class Predictions:
    """Predicted and right classes of this rank's samples; on the device until they are gathered."""

    model: nn.Module
    """Answers with logits, which the copies of `distributed=dp` do not."""
    pairs: list[Tensor] = field(default_factory=list)
    """Each of shape (2, samples)."""

    @torch.no_grad()
    def add_evaluation(self, job: Answering, batch: MicroBatch, total: Tensor) -> None:
        """Note one micro-batch, and add its loss, summed over its labels, to `total`."""
        with job.formats.eval_autocast():
            logits = self.model(**batch.inputs).logits
            total += loss_sum(logits, batch.labels)
        self.pairs.append(torch.stack([logits.argmax(-1), batch.labels]))

    def gather(self, ranks: Ranks) -> tuple[list[int], list[int]]:
        """Predicted and right classes of all ranks; a placeholder of a rank is no sample."""
        mine = torch.cat(self.pairs, 1) if self.pairs else torch.empty(2, 0, dtype=torch.int64)
        kept = mine[:, mine[1] != IGNORED].tolist()
        each = ranks.gather(kept)
        return [x for part in each for x in part[0]], [x for part in each for x in part[1]]


def classification_metrics(
    found: Sequence[int], right: Sequence[int], names: Sequence[str]
) -> tuple[metrics.Row, dict[str, Any]]:
    """Values for a row of metrics.jsonl, and those of each class for the record.

    Averages are over the classes that were predicted or are right, as scikit-learn's are.

    Args:
        found: predicted classes.
        right: of the same samples.
        names: of all classes, by number.
    """
    from sklearn import metrics as sk

    classes = range(len(names))
    each = sk.precision_recall_fscore_support(right, found, labels=classes, zero_division=0.0)
    parts = dict(zip(("precision", "recall", "f1", "support"), each, strict=True))
    details: dict[str, Any] = {"names": list(names), **{k: v.tolist() for k, v in parts.items()}}
    if len(names) <= MOST_IN_MATRIX:
        details["confusion"] = sk.confusion_matrix(right, found, labels=classes).tolist()
    f1 = {kind: sk.f1_score(right, found, average=kind, zero_division=0.0)
          for kind in ("macro", "micro")}  # fmt: skip
    row = {"eval/accuracy": sk.accuracy_score(right, found)}
    row |= {f"eval/f1_{kind}": value for kind, value in f1.items()}
    return {key: float(value) for key, value in row.items()}, details
