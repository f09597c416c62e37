"""Metrics of own code. Rank 0 receives all micro-batches in the order of one process."""

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from eke.common.errors import RunError
from eke.config.parts import Part, own_parts
from eke.plan.own_code import call_part, load_part
from eke.plan.planner import Plan
from eke.training.batches.batches import MicroBatch
from eke.training.custom import bind_part, describe_shapes, parameters_of, refuse
from eke.training.custom.outputs import logits_of
from eke.training.custom.samples import kept_random
from eke.training.distributed.ranks import Ranks

_log = logging.getLogger(__name__)

_METHODS = ("update", "compute", "reset")


class _Mean:
    """Metric by a function of output and batch: its mean over the samples."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def reset(self) -> None:
        """Forget all samples."""
        self.total, self.count = 0.0, 0

    def update(self, *given: Any, num_samples: int, **named: Any) -> None:
        """Add the function's value for a micro-batch."""
        self.total += float(self.function(*given, **named)) * num_samples
        self.count += num_samples

    def compute(self) -> float:
        """Return the mean."""
        return self.total / self.count


class _OfAll:
    """Metric by transformers' `compute_metrics(eval_pred)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def reset(self) -> None:
        """Forget all samples."""
        self.pairs: tuple[Any, Any] | None = None

    def update(self, output: Any, batch: Mapping[str, Any], label: Any = None) -> None:
        """Keep logits and labels of a micro-batch, padded as in transformers."""
        from transformers.trainer_pt_utils import nested_concat

        label = batch.get("labels", batch.get("label")) if label is None else label
        if label is None:
            raise RunError(f"the batch has no labels, only {', '.join(batch)}")
        pair = logits_of(output).numpy(), np.asarray(label)
        self.pairs = pair if self.pairs is None else nested_concat(self.pairs, pair)

    def compute(self) -> Any:
        """Return the function's value of all samples."""
        from transformers import EvalPrediction

        assert self.pairs is not None, "update was called"
        return self.function(EvalPrediction(predictions=self.pairs[0], label_ids=self.pairs[1]))


def build_metric(part: Part, inputs: Mapping[str, str]) -> Any:
    """Return an object with `update`, `compute` and `reset`."""
    target = load_part(part)
    if not isinstance(target, type):
        needed = [
            name for name, p in parameters_of(target).items()
            if p.default is p.empty and name not in part.args and p.kind is p.POSITIONAL_OR_KEYWORD
        ]  # fmt: skip
        if len(needed) == 1 and not inputs:
            return _OfAll(bind_part(part))
        if needed:
            return _Mean(bind_part(part))
    made = call_part(part)
    for name in _METHODS:
        if not callable(getattr(made, name, None)):
            what = f"{type(made).__name__} has no {name}. A metric has update, compute and reset"
            raise refuse(part, what)
    return made


class OwnMetrics:
    """All metrics of a run, which see the micro-batches of an evaluation."""

    def __init__(self, plan: Plan, ranks: Ranks, warn: Callable[[str], None]) -> None:
        self.ranks, self.warn = ranks, warn
        self.needed = (plan.config.train.keep_best or "").split("/")[0]
        parts = [part for part in own_parts(plan.config) if part.key.startswith("metrics.")]
        self.parts = {part.key.partition(".")[2]: part for part in parts}
        self.inputs = {name: plan.config.metrics[name].inputs for name in self.parts}
        self.objects: dict[str, Any] = {}
        if ranks.is_main:
            self.objects = {n: build_metric(p, self.inputs[n]) for n, p in self.parts.items()}

    def __bool__(self) -> bool:
        return bool(self.parts)

    def reset(self) -> None:
        """Begin an evaluation."""
        self._each(lambda name, found: found.reset())

    def add(self, output: Any, batch: MicroBatch) -> None:
        """Add a micro-batch of each rank, on the host. Collective."""
        mine = None
        if batch.num_samples:
            mine = _to_host(output), _to_host(batch.mapping), batch.num_samples
        for each in self.ranks.gather(mine):
            if each is not None and self.ranks.is_main:
                self._update(*each)

    def _update(self, output: Any, batch: dict[str, Any], num_samples: int) -> None:
        def update(name: str, found: Any) -> None:
            more = {"num_samples": num_samples} if isinstance(found, _Mean) else {}
            named = {p: self._value(name, k, output, batch) for p, k in self.inputs[name].items()}
            if named and not isinstance(found, _OfAll):
                found.update(**named, **more)
            else:
                found.update(output, batch, **named, **more)

        self._each(update)

    def _value(self, name: str, key: str, output: Any, batch: Mapping[str, Any]) -> Any:
        """Return a value of the output, else of the batch."""
        held = output.get(key) if isinstance(output, Mapping) else getattr(output, key, None)
        if held is not None:
            return held
        if key == "logits":
            return logits_of(output)
        if key not in batch:
            raise RunError(
                f"metrics.{name}.inputs: neither the output {describe_shapes(output)} nor the "
                f"batch has {key}. The batch has {', '.join(batch)}"
            )
        return batch[key]

    def compute(self) -> dict[str, float]:
        """Return `eval/NAME` or `eval/NAME/KEY` -> number, of all ranks' samples. Collective."""
        row: dict[str, float] = {}

        def compute(name: str, found: Any) -> None:
            value = found.compute()
            if isinstance(value, Mapping):
                row.update({f"eval/{name}/{key}": float(each) for key, each in value.items()})
            else:
                row[f"eval/{name}"] = float(value)

        self._each(compute)
        found: dict[str, float] = self.ranks.tell(row)
        return found

    def _each(self, action: Callable[[str, Any], None]) -> None:
        """Do something with each metric, with the random state kept. One that fails is removed."""
        for name, found in list(self.objects.items()):
            try:
                with kept_random():
                    action(name, found)
            except Exception as error:
                why = f"metrics.{name}: {type(error).__name__}: {error}"
                if name == self.needed:
                    raise RunError(f"{why}\n  -> train.keep_best=loss") from error
                del self.objects[name]
                self.warn(f"{why}. It is switched off")


def _to_host(value: Any) -> Any:
    """Copy tensors to the host, 16-bit ones in float32, also in attributes of objects."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            narrow = leaf.is_floating_point() and leaf.dtype.itemsize < torch.float32.itemsize
            return leaf.detach().to("cpu", torch.float32 if narrow else leaf.dtype)
        if hasattr(leaf, "__dict__") and not isinstance(leaf, type):
            leaf = copy.copy(leaf)
            vars(leaf).update({name: _to_host(each) for name, each in vars(leaf).items()})
        return leaf

    return tree_map(moved, value)
