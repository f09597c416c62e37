"""The optimizer steps inside the backward pass: one gradient is alive at a time."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class InBackwardUpdate:
    """Each weight is updated as soon as its gradient is whole, and the gradient freed.

    Lv et al. 2023 (LOMO), arXiv:2306.09782, section 3.1. A hook steps the one optimizer with its
    groups narrowed to a single weight, so that its state, and a checkpoint of it, are those of an
    ordinary run. A gradient is whole after one backward pass: no accumulation, no exchange, and no
    clipping by a norm that is known only at the end (rules in rules/memory.py).
    """

    even = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[nn.Parameter],
        knows_norm: bool,
    ) -> None:
        self.knows_norm = knows_norm
        self.optimizer = optimizer
        self.parameters = parameters
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._group_of = {
            parameter: number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        for parameter in parameters:
            hook: Any = parameter.register_post_accumulate_grad_hook  # torch 2.13: no annotations
            hook(self._step)

    def exchange(self, last: bool) -> AbstractContextManager[None]:
        """There is one micro-batch, and nobody to exchange with."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Gradients come into being, update their weights and go."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch 2.13

    def apply(self, learning_rate: float) -> Tensor | None:
        """All that is left is the norm: of the gradients there were, in the order of the weights.

        The learning rate was in the optimizer's groups when the backward pass began.
        """
        if not self.knows_norm:
            return None
        norms = [self._norms[p] for p in self.parameters if p in self._norms]
        self._norms = {}
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def held(self) -> list[Tensor]:
        """None."""
        return []

    def gather(self, keep: bool) -> None:
        """Nothing: the model and the optimizer hold it all."""

    def _step(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is None:
            return
        if self.knows_norm:
            # Of bfloat16 gradients, too, in float32: rounded norms are no norm of the whole.
            self._norms[parameter] = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
        with self._only(parameter):
            self.optimizer.step()
        parameter.grad = None

    @contextmanager
    def _only(self, parameter: nn.Parameter) -> Iterator[None]:
        """The optimizer knows this weight alone; searching all for each would take n^2 looks."""
        groups = self.optimizer.param_groups
        group = groups[self._group_of[parameter]]
        self.optimizer.param_groups = [{**group, "params": [parameter]}]
        try:
            yield
        finally:
            self.optimizer.param_groups = groups
