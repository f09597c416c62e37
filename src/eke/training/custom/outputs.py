"""Calls of models of own code: arguments of the forward pass, logits, loss and its count."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from eke.common.errors import RunError
from eke.config.schema import CustomData, CustomTask
from eke.plan.planner import Plan
from eke.training.batches.batches import MicroBatch
from eke.training.custom import (
    bind_part,
    describe_shapes,
    find_part,
    parameters_of,
    refuse,
    takes_any,
)

InputsOf = Callable[[MicroBatch], Mapping[str, Any]]
"""Function from a micro-batch to the arguments of a forward pass."""


class ForwardArguments:
    """Function that picks a forward pass's arguments from a batch by the names of parameters."""

    def __init__(self, model: nn.Module, renamed: Mapping[str, str]) -> None:
        found = parameters_of(model.forward)
        self.kind, self.renamed, self.takes_any = type(model).__name__, renamed, takes_any(found)
        variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        self.parameters = {n: p for n, p in found.items() if p.kind not in variable}
        for name in renamed if not self.takes_any else ():
            if name not in self.parameters:
                known = ", ".join(self.parameters)
                raise RunError(f"model.inputs.{name}: {self.kind}.forward has only {known}")

    def __call__(self, batch: MicroBatch) -> dict[str, Any]:
        """Return the arguments. RunError: The batch has no key for a parameter without default."""
        values = batch.mapping
        used: dict[str, str] = {}
        for number, (name, parameter) in enumerate(self.parameters.items()):
            key = self.renamed.get(name, name)
            if key not in values and name not in self.renamed:
                key = str(number)  # items of a tuple are in order
            if key in values:
                used[name] = key
            elif parameter.default is parameter.empty or name in self.renamed:
                raise self._missing(name, values)
        if self.takes_any:
            taken = {*used.values(), *self.renamed.values()}
            used |= {n: k for n, k in self.renamed.items() if k in values}
            used |= {key: key for key in values if key not in taken}
        return {name: values[key] for name, key in used.items()}

    def _missing(self, name: str, values: Mapping[str, Any]) -> RunError:
        keys, wanted = ", ".join(values), self.renamed.get(name)
        free = [key for key in values if key not in self.parameters]
        why = f"{self.kind}.forward needs {name}"
        why = f"model.inputs.{name} = {wanted}" if wanted else why
        fix = f"model.inputs.{name}={(free or [*values])[0]}"
        return RunError(f"{why}, and the batch has the keys {keys}\n  -> {fix}")


def forward_arguments(plan: Plan, model: nn.Module) -> InputsOf:
    """Return the function that selects the arguments of the model's forward pass."""
    if find_part(plan.config, "model") is None:
        if find_part(plan.config, "data") is None:
            return lambda batch: batch.inputs
        return ForwardArguments(model, {})
    return ForwardArguments(model, plan.config.model.inputs)  # type: ignore[attr-defined]  # of CustomModel


def logits_of(output: Any) -> Tensor:
    """Return the logits of an output: itself, its `logits`, or its first item."""
    found = getattr(output, "logits", None)
    if isinstance(output, Tensor):
        found = output
    elif found is None and isinstance(output, Mapping):
        found = output.get("logits")
    elif found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, Tensor):
        raise RunError(
            f"the model's output has no logits: {describe_shapes(output)}. It needs to be a "
            "tensor, have `logits`, or begin with a tensor"
        )
    return found


def _returned_loss(output: Any) -> Any:
    """Return the loss that a model returned. RunError: None or several."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is not None:
        return found
    each = output if isinstance(output, tuple | list) else (output,)
    scalars = [x for x in each if isinstance(x, Tensor) and not x.dim() and x.is_floating_point()]
    if len(scalars) != 1:
        has = f"{len(scalars)} losses" if scalars else "no loss"
        raise RunError(
            f"loss = auto: the model's output has {has}: {describe_shapes(output)}. It needs a "
            "key or attribute `loss`, or one number in a tuple\n  -> loss=custom loss.target=PATH"
        )
    return scalars[0]


class OwnLoss:
    """Loss of own code, summed: a mean times the count of the micro-batch, or a sum."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self.arguments = forward_arguments(plan, model)
        self.part = find_part(plan.config, "loss")
        self.function = bind_part(self.part) if self.part else None
        self.counts: list[Tensor] | None = None
        """Counts that the loss returned in the current step, None if it returns means."""

    def __call__(self, model: Callable[..., Any], batch: MicroBatch, **_: Any) -> Tensor:
        """Return the loss of a micro-batch, a float32 scalar."""
        return self.sum_of(model(**self.arguments(batch)), batch)

    def sum_of(self, output: Any, batch: MicroBatch) -> Tensor:
        """Return the summed loss of an output."""
        if not batch.num_targets:  # a mean over nothing is not a number
            return _zero(output)
        found = self.function(output, batch.mapping) if self.function else _returned_loss(output)
        if isinstance(found, tuple) and len(found) == 2:
            total, count = self._checked(found[0]), torch.as_tensor(found[1])
            if self.counts is None:
                self.counts = []
            self.counts.append(count.detach().to(total.device, torch.float64).reshape(()))
            return total
        return self._checked(found) * batch.num_targets

    def _checked(self, loss: Any) -> Tensor:
        if isinstance(loss, Tensor) and not loss.dim() and loss.is_floating_point():
            if loss.requires_grad or not torch.is_grad_enabled():
                return loss.float()
            why = "has no gradient"
        else:
            why = f"is {describe_shapes(loss)}, not one number"
        if self.part:
            raise refuse(self.part, f"the loss {why}")
        raise RunError(f"loss = auto: the loss of the model's output {why}")


def _zero(output: Any) -> Tensor:
    """Return 0 with zero gradients, for a micro-batch without targets."""
    tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    # A loss in the output is not a number, whose product with 0 is none either.
    wide = [x for x in tensors if x.dim()] or tensors
    return torch.stack([x.float().sum() * 0.0 for x in wide]).sum()


Count = Callable[[Mapping[str, Any], int], int]
"""Function from a batch and its number of samples to the divisor of a mean loss."""


def build_count(plan: Plan) -> Count:
    """Return the function that counts by `loss.per`."""
    per, part = plan.config.loss.per, find_part(plan.config, "loss.per")
    if part:
        function = bind_part(part)
        return lambda batch, samples: int(function(batch))
    if per in (None, "samples"):
        return lambda batch, samples: samples

    def count(batch: Mapping[str, Any], samples: int) -> int:
        if not isinstance(batch.get(str(per)), Tensor):
            raise RunError(
                f"loss.per = {per}: the batch has no tensor of this key. It has "
                f"{', '.join(batch)}\n  -> loss.per=samples"
            )
        return int((batch[str(per)] >= 0).sum())

    return count


def has_own_loss(plan: Plan) -> bool:
    """Return whether own code computes the loss, of any model and data."""
    config = plan.config
    own = isinstance(config.data, CustomData) or isinstance(plan.targets, CustomTask)
    return own or find_part(config, "loss") is not None
