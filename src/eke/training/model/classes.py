"""The names of a classifier's classes, as its config.json is saved with them."""

from typing import Any

from torch import nn

from eke.config.schema import PretrainedModel, SequenceClassification
from eke.plan.planner import Plan
from eke.training.batches.sources import class_names
from eke.training.model.pretrained import LoadReport


def name_classes(plan: Plan, model: nn.Module, report: LoadReport) -> list[str]:
    """Put the data's names into the model's configuration, where plain transformers reads them.

    A class without a name of its own is called `LABEL_number`, as transformers does.

    Args:
        plan: the run.
        model: transformers' own class or peft's.
        report: what of it came from a checkpoint.

    Returns:
        Sentences for log and record: a trained head that begins with other classes.
    """
    task = plan.config.task
    names = class_names(plan)
    if not names or not isinstance(task, SequenceClassification):
        return []
    config: Any = model.config
    before = config.id2label
    after = dict(enumerate(names))
    for number in range(len(names), task.num_labels):
        name = f"LABEL_{number}"
        after[number] = name if name not in names else f"CLASS_{number}"  # the data's, of another
    config.id2label = after
    config.label2id = {name: number for number, name in after.items()}
    trained = isinstance(plan.config.model, PretrainedModel) and not (
        report.new_weights or report.resized_weights
    )
    named = any(name != f"LABEL_{number}" for number, name in before.items())
    if not trained or not named or before == after:
        return []
    return [
        f"the checkpoint's head was trained on the classes {_listed(before)}, and goes on with "
        f"{_listed(after)}"
    ]


def _listed(names: dict[int, str]) -> str:
    shown = [f"{number}={names[number]}" for number in sorted(names)[:5]]
    return " ".join(shown) + (" ..." if len(names) > len(shown) else "")
