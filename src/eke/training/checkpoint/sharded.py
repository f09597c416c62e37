"""The optimizer step of a training state that is cut into parts: FSDP2."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from eke.config.schema import Exchange
from eke.training.distributed.sharding import (
    WholeState,
    exchange_gradients,
    gather_optimizer,
    gather_parameters,
    gather_weights,
    part_bytes,
    whole,
)
from eke.training.model.adapter_files import is_adapted
from eke.training.optimizer import evaluation_weights
from eke.training.optimizer.update import PlainUpdate


class ShardedUpdate:
    """Gradients are exchanged in backward, and each rank updates its part of every tensor."""

    even = True

    def __init__(self, plain: PlainUpdate, model: nn.Module, exchange: Exchange) -> None:
        self.plain = plain
        self.model = model
        self.every = exchange is Exchange.every
        self.gradient_bytes = 0
        """Of this rank's part, as the first step found it."""

    def exchange(self, last: bool) -> AbstractContextManager[None]:
        """Says whether the next backward pass sends its gradients around."""
        exchange_gradients(self.model, last or self.every)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Ranks average their gradients here, too, where they should sum them."""
        self.plain.backward(loss)

    def apply(self, learning_rate: float) -> Tensor | None:
        """One step on the parts; the norm is that of the whole gradient."""
        if not self.gradient_bytes:
            gradients = [p.grad for p in self.plain.parameters]
            self.gradient_bytes = part_bytes(g for g in gradients if g is not None)
        norm = self.plain.apply(learning_rate)
        return None if norm is None else whole(norm)

    def held(self) -> list[Tensor]:
        """None."""
        return []

    def gather(self, keep: bool) -> WholeState:
        """Weights and optimizer state put together, tensor by tensor."""
        optimizer: torch.optim.Optimizer = self.plain.optimizer
        state = gather_optimizer(optimizer, keep)
        with evaluation_weights(optimizer) as mine:
            weights = gather_weights(self.model, keep, frozen=not is_adapted(self.model))
        training = gather_parameters(optimizer, keep) if mine else []  # which are back by now
        return WholeState(weights, state, training)

    def all_weights(self, keep: bool) -> dict[str, Tensor]:
        """Every weight, frozen ones too, where `keep`; every rank must call it."""
        return gather_weights(self.model, keep)
