"""An optimizer step by DeepSpeed's engine, and what a checkpoint has to hold of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from eke.common.errors import RunError
from eke.plan.planner import Plan
from eke.training.distributed.deepspeed import (
    LOCKSTEP,
    Engine,
    flat_pieces,
    gather_weights,
    held_tensors,
    piece_numbers,
)
from eke.training.distributed.swapping import in_memory
from eke.training.loop.loss_scale import LossScale
from eke.training.model.adapter_files import is_adapted


class DeepSpeedUpdate:
    """Gradients are exchanged, clipped and applied by the engine; eke says when, and how fast."""

    def __init__(self, plan: Plan, engine: Engine, device: torch.device) -> None:
        self.engine = engine
        self.even = plan.config.distributed.option in LOCKSTEP
        self.device = device
        self.world_size = plan.batch.world_size
        self.scale = LossScale() if plan.compute.loss_scaling else None

    @contextmanager
    def exchange(self, last: bool) -> Iterator[None]:
        """ZeRO-1 exchanges in the last micro-batch, ZeRO-2 and 3 in each."""
        self.engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        """DeepSpeed averages over ranks what should be summed, hence the factor.

        The division by the accumulation steps is left out: the loss is divided by the targets of
        the whole global batch already.
        """
        if self.scale:
            self.engine.optimizer.override_loss_scale(self.scale.value)
        self.engine.backward(loss * self.world_size, scale_wrt_gas=False)

    def apply(self, learning_rate: float) -> Tensor:
        """One step of the engine; with float16, a step whose gradients overflowed is skipped."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        if self.scale:
            self.scale.update(overflowed=bool(self.engine.optimizer.overflow))
        norm = self.engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self.device).detach()

    def gather(self, keep: bool) -> None:
        """Nothing: each rank writes its part."""

    def held(self) -> list[Tensor]:
        """The engine's flat pieces, gradients and cut weights."""
        return held_tensors(self.engine)

    def weights(self, keep: bool) -> dict[str, Tensor] | None:
        """What a checkpoint holds of the weights where `keep`; None where the model has them.

        A collective: every rank must call it.
        """
        if self.engine.zero_optimization_stage() < 3:
            return None
        return gather_weights(self.engine, keep, frozen=not is_adapted(self.engine.module))

    def all_weights(self, keep: bool) -> dict[str, Tensor] | None:
        """As `weights`; frozen ones, too, which a checkpoint of adapters leaves out."""
        if self.engine.zero_optimization_stage() < 3:
            return None
        return gather_weights(self.engine, keep)

    def part(self) -> dict[str, Any]:
        """This rank's part of the training state, but for the weights: tensors and numbers.

        Float32 pieces are part of it where the weights are narrower.
        """
        pieces = flat_pieces(self.engine)
        return {
            "optimizer": [self._state(number, piece) for number, piece in enumerate(pieces)],
            "master": [piece.detach() for piece in pieces]
            if self.engine.bfloat16_enabled()
            else [],
            "loss_scale": self.scale.state_dict() if self.scale else {},
        }

    def _state(self, number: int, piece: Tensor) -> dict[str, Any]:
        """What the optimizer keeps for one piece, in memory of its own where a file has it."""
        with in_memory(self.engine, number) as borrowed:
            state = dict(self.engine.basic_optimizer.state.get(piece, {}))
            return {name: _copied(v) for name, v in state.items()} if borrowed else state

    def load_part(self, part: dict[str, Any]) -> None:
        """Continue from what `part` gave; the weights have been loaded before the engine was made.

        Raises:
            RunError: it belongs to a model or a sharing of another kind.
        """
        state, pieces = self.engine.basic_optimizer.state, flat_pieces(self.engine)
        if len(pieces) != len(part["optimizer"]):
            raise RunError(
                f"the checkpoint holds {len(part['optimizer'])} pieces of optimizer state, this "
                f"run has {len(pieces)}"
            )
        numbers = piece_numbers(self.engine)
        for number, (piece, saved) in enumerate(zip(pieces, part["optimizer"], strict=True)):
            sizes = {v.numel() for v in saved.values() if isinstance(v, Tensor) and v.dim()}
            if sizes and numbers[number] not in sizes:  # 8-bit states have scales of other sizes
                raise RunError(
                    f"the checkpoint holds optimizer state for {max(sizes)} numbers where this run "
                    f"has {numbers[number]}"
                )
            with in_memory(self.engine, number, write=True):
                state[piece] = {name: _placed(value, piece) for name, value in saved.items()}
        for piece, copied in zip(pieces, part["master"], strict=False):
            piece.data.copy_(copied)
        if self.scale and part["loss_scale"]:
            self.scale.load_state_dict(part["loss_scale"])


def _placed(value: Any, piece: Tensor) -> Any:
    """Moments lie where their piece lies; counters stay on the host, as the optimizer made them."""
    return value.to(piece.device) if isinstance(value, Tensor) and value.dim() else value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
