"""The second half of an optimizer step: gradients are exchanged, clipped and applied.

What shares or offloads the training state brings an `Update` of its own; the loop knows only this.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from eke.config.schema import FSDP
from eke.plan.planner import Plan
from eke.training.distributed.sharding import WholeState


class Update(Protocol):
    """How one optimizer step is taken."""

    even: bool
    """Every forward pass talks to the other ranks, so that all need the same number of them."""

    def exchange(self, last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch: ranks exchange gradients in the last one of a step."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`: this rank's share of the global batch's mean, a scalar."""

    def apply(self, learning_rate: float) -> Tensor | None:
        """Clip, step and forget the gradients; returns their norm before clipping, on the device.

        The norm is that of the whole model over all ranks; None where nobody wants to know. The
        loop has written the learning rate into the optimizer's groups before the first micro-batch.
        """

    def gather(self, keep: bool) -> WholeState | None:
        """What a checkpoint holds, where no process has it all; every rank must call it.

        Args:
            keep: whether this rank wants it; the others may get it empty.
        """

    def held(self) -> list[Tensor]:
        """Tensors of this rank that belong neither to the model nor to the optimizer's state."""


class PlainUpdate:
    """Every rank has all weights, and a torch optimizer over them: one process, or ddp."""

    even = False

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        parameters: list[nn.Parameter],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.parameters = parameters
        self.world_size = plan.batch.world_size
        self.max_grad_norm = plan.config.train.max_grad_norm
        needed = self.max_grad_norm is not None or scaler is not None
        self.knows_norm = needed or plan.config.train.record_grad_norm
        self.clips_in_step = scaler is None and takes_scale(plan, optimizer)

    def exchange(self, last: bool) -> AbstractContextManager[None]:
        """Gradients of the earlier micro-batches only add up."""
        if last or self.world_size == 1:
            return nullcontext()
        # A forecast traces one of several processes, whose model nothing wraps.
        no_sync: Callable[[], AbstractContextManager[None]] = getattr(
            self.model, "no_sync", nullcontext
        )
        return no_sync()

    def backward(self, loss: Tensor) -> None:
        """Ranks average their gradients where they should sum them, hence the factor."""
        shared = loss * self.world_size if self.world_size > 1 else loss
        # Not Accelerate's: it divides by its accumulation steps, also where there is one.
        (self.scaler.scale(shared) if self.scaler else shared).backward()  # type: ignore[no-untyped-call]  # torch 2.13

    def apply(self, learning_rate: float) -> Tensor | None:
        """One step of the optimizer at this learning rate."""
        norm = self.clip()
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def gather(self, keep: bool) -> WholeState | None:
        """Nothing: the model and the optimizer hold it all."""
        return None

    def held(self) -> list[Tensor]:
        """None."""
        return []

    def clip(self) -> Tensor | None:
        """Global gradient norm before clipping; clips where that was asked for."""
        if not self.knows_norm:
            return None
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        norm = norm_in_float32([p.grad for p in self.parameters if p.grad is not None])
        if self.max_grad_norm is None:
            return norm
        if self.clips_in_step:
            divisor = ((norm + CLIP_EPS) / self.max_grad_norm).clamp(min=1.0)
            self.optimizer.grad_scale = divisor  # type: ignore[attr-defined]  # torch 2.13
        else:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, norm)
        return norm


CLIP_EPS = 1e-6
"""Added to the norm before it divides: torch.nn.utils.clip_grads_with_norm_'s."""


def takes_scale(plan: Plan, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer divides the gradients by its `grad_scale` as it reads them.

    torch's fused kernels do, for torch.amp.GradScaler, which asks for the same mark. Clipping
    through it spares a pass over all gradients, and its launches. Cut by FSDP2 they are DTensors,
    which no kernel takes beside a plain scale.
    """
    cut = plan.batch.world_size > 1 and isinstance(plan.config.distributed, FSDP)
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not cut


def norm_in_float32(gradients: list[Tensor]) -> Tensor:
    """Norm of gradients of any format as one vector; a scalar.

    torch 2.13's `get_total_norm` answers in the gradients' format (two to three digits in bfloat16)
    and first sorts them by device and format, in every step; here they are on one device.
    """
    # On a GPU a few kernels for all of them, where a norm for each is a launch for each.
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total
