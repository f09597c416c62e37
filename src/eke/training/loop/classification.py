"""Evaluation of a classifier: loss, and metrics of its predictions by scikit-learn."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from eke.plan.record import metrics
from eke.training.batches.batches import MicroBatch, is_label
from eke.training.custom.outputs import logits_of
from eke.training.distributed.ranks import Ranks

_MOST_IN_MATRIX = 100
"""Most classes for which the record holds a confusion matrix (10,000 numbers)."""


@dataclass
class Predictions:
    """Predictions and labels of this rank's samples, kept on the device until they are gathered."""

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Predictions and labels of each micro-batch, both with the labels' shape."""

    def add(self, output: Any, batch: MicroBatch) -> None:
        """Keep a micro-batch's predictions."""
        assert batch.labels is not None, "data of classes has labels"
        logits = logits_of(output)
        found = logits.argmax(-1)
        if batch.labels.is_floating_point():  # multi-hot classes (probability over 0.5) or numbers
            found = logits > 0 if batch.labels.dim() == 2 else logits.float().reshape(-1)
        self.pairs.append((found, batch.labels))

    def gather(self, ranks: Ranks) -> tuple[np.ndarray, np.ndarray]:
        """Return predictions and labels of all ranks, both `[samples]` or `[samples, classes]`."""
        each = ranks.gather([tuple(x.cpu().numpy() for x in pair) for pair in self.pairs])
        pairs = [pair for mine in each for pair in mine]
        found, right = (np.concatenate(x) for x in zip(*pairs, strict=True))
        # Placeholders have no labels.
        kept = is_label(right).reshape(len(right), -1).all(1)
        return found[kept], right[kept]


def _regression_metrics(found: np.ndarray, right: np.ndarray) -> metrics.Row:
    """Return errors and correlations, without undefined values (constant or not finite)."""
    from scipy import stats
    from sklearn import metrics as sk

    if not np.isfinite(found).all():
        return {}
    found, right = found.astype(np.float64), right.astype(np.float64)
    row = {"mae": sk.mean_absolute_error(right, found), "mse": sk.mean_squared_error(right, found)}
    if np.ptp(right) > 0:
        row["r2"] = sk.r2_score(right, found)
        if np.ptp(found) > 0:
            row["pearson"] = stats.pearsonr(right, found).statistic
            row["spearman"] = stats.spearmanr(right, found).statistic
    return {f"eval/{name}": float(value) for name, value in row.items()}


def classification_metrics(
    found: Sequence[int] | np.ndarray, right: Sequence[int] | np.ndarray, names: Sequence[str]
) -> tuple[metrics.Row, dict[str, Any]]:
    """Return a row of averages, and values per class. Class indices, multi-hot, or numbers."""
    from sklearn import metrics as sk

    if np.ndim(right) == 1 and np.asarray(right).dtype.kind == "f":
        return _regression_metrics(np.asarray(found), np.asarray(right)), {}
    classes = range(len(names))
    each = sk.precision_recall_fscore_support(right, found, labels=classes, zero_division=0.0)
    parts = dict(zip(("precision", "recall", "f1", "support"), each, strict=True))
    details: dict[str, Any] = {"names": list(names), **{k: v.tolist() for k, v in parts.items()}}
    if len(names) <= _MOST_IN_MATRIX and np.ndim(right) == 1:
        details["confusion"] = sk.confusion_matrix(right, found, labels=classes).tolist()
    row = {"eval/accuracy": float(sk.accuracy_score(right, found))}
    for kind in ("macro", "micro"):
        f1 = sk.f1_score(right, found, average=kind, zero_division=0.0)
        row[f"eval/f1_{kind}"] = float(f1)
    return row, details
