"""What a rank holds of a training state, as pieces of a checkpoint, and back from any checkpoint.

Schedule-Free's weights are its average under their own names, and `NAME@training` are those that
it trains. `NAME@master` is the float32 copy of a narrower weight.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eke.common.errors import RunError
from eke.training.distributed.fsdp import part
from eke.training.distributed.parts import rows
from eke.training.model.adapters import is_adapted
from eke.training.model.number_formats import MASTER, copied_from
from eke.training.optimizer.build_optimizer import evaluation_weights
from eke.training.part_files import Held, Piece, SavedTensors

TRAINING = "training"


def named_weights(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What a checkpoint has of a model, and other names of it; of adapters what is trained alone.

    Every rank must call it: a hook of FSDP2 first cuts again what an evaluation has left whole.
    """
    found: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        elif tensor.requires_grad or not is_adapted(model):
            first[id(tensor)], found[name] = name, tensor
    return found, tied


def place_of(tensor: Tensor) -> tuple[int, int, bool]:
    """This rank's number among those with other rows, their count, and whether it is to write."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return 0, 1, True
    *copy, rank = tensor.device_mesh.get_coordinate() or [0]  # `build_mesh`: "shard" is the last
    return rank, tensor.device_mesh.size(len(copy)), not any(copy)


def place_in(model: nn.Module) -> tuple[int, int, bool]:
    """The same for the tensors of a model that are cut."""
    return max(map(place_of, model.parameters()), key=lambda place: place[1])


def row_piece(tensor: Tensor, rank: int = 0, world_size: int = 1) -> Piece:
    """View of the rows that this rank has of a cut tensor, or is to write of a whole one."""
    cut = place_of(tensor)[1] > 1
    rank, world_size = place_of(tensor)[:2] if cut else (rank, world_size)
    shape = tuple(tensor.shape)
    local = part(tensor.detach()).reshape(-1) if not shape else part(tensor.detach())
    mine = rows((*shape, 1)[0], rank, world_size)
    return Piece(local if cut else local[mine], mine.start * prod(shape[1:]), shape)


@dataclass(frozen=True)
class Stepped:
    """One parameter of an optimizer, and which weights it has numbers of."""

    parameter: Tensor
    cut: Callable[[Tensor], dict[str, Piece]]
    """A tensor of the parameter's size -> views of this rank's numbers, by the weight's name."""
    is_copy: bool = False
    """In float32, of weights in another format."""
    held: Callable[[bool], AbstractContextManager[bool]] = lambda write: nullcontext(False)
    """Brings it into memory, to `write` it perhaps; yields whether it goes again."""


def stepped_by(model: nn.Module, optimizer: Optimizer, *place: int) -> list[Stepped]:
    """The parameters of an optimizer over whole weights or FSDP2's parts of them.

    `place` is this rank and the number of ranks, where they share out what is not cut.
    """
    names = {id(tensor): name for name, tensor in named_weights(model)[0].items()}
    copied = copied_from(optimizer)

    def cut(name: str) -> Callable[[Tensor], dict[str, Piece]]:
        return lambda tensor: {name: row_piece(tensor, *place)}

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [Stepped(p, cut(names[id(copied.get(p, p))]), p in copied) for p in parameters]


def hold(model: nn.Module, optimizer: Optimizer) -> Held:
    """Weights and optimizer state of a model that FSDP2 has cut."""
    rank, world_size, writes = place_in(model)
    with evaluation_weights(optimizer) as training:
        found, tied = named_weights(model)
        pieces = {
            name: row_piece(t.detach().clone() if training else t, rank, world_size)
            for name, t in found.items()
        }
    held = Held(pieces, {"tied": tied}, rank, world_size, writes)
    stepped = stepped_by(model, optimizer, rank, world_size)
    for each, tensor in zip(stepped, training, strict=False):
        held.pieces |= {f"{name}@{TRAINING}": p for name, p in each.cut(tensor).items()}
    groups = [
        {k: v for k, v in group.items() if isinstance(v, int | float)}
        for group in optimizer.param_groups
    ]
    return hold_state(held, stepped, optimizer.state, groups)


def hold_state(
    held: Held, stepped: list[Stepped], states: Mapping[Any, Any], groups: Any = None
) -> Held:
    """Add what an optimizer keeps to the weights that a rank holds."""
    held.notes |= {"numbers": {}, "groups": groups}
    for number, each in enumerate(stepped):
        with each.held(False) as borrowed:
            state = {**states.get(each.parameter, {})}
            if each.is_copy:
                state[MASTER] = each.parameter
            sized = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim()}
            own = any(v.shape != each.parameter.shape for v in sized.values())  # scales of blocks
            for key, value in sized.items():
                found = {str(number): Piece(value)} if own else each.cut(value)
                for name, piece in found.items():
                    if piece.tensor.numel():
                        kept = piece.tensor.clone() if borrowed else piece.tensor
                        held.pieces[f"{name}@{key}"] = replace(piece, tensor=kept)
            for name, piece in each.cut(each.parameter).items():
                if piece.first or not piece.tensor.numel():
                    continue  # the rank with a weight's first number writes what it has one of
                for key in state.keys() - sized:
                    if isinstance(value := state[key], Tensor):
                        held.pieces[f"{name}@{key}"] = Piece(value, 0, ())
                    else:
                        held.notes["numbers"][f"{name}@{key}"] = value
    return held


@torch.no_grad()
def load_held(model: nn.Module, saved: SavedTensors) -> None:
    """Put the saved weights into a model, whole or cut by FSDP2, in place.

    Raises RunError: a tensor is missing, unknown, or of another size or format.
    """
    places, tied = named_weights(model)
    for name in saved.names:
        if "@" not in name and name not in places and name not in tied:
            raise RunError(f"{name} has no place in {type(model).__name__}")
    for name, place in places.items():
        there, here = (saved.shape(name), saved.dtype(name)), (tuple(place.shape), place.dtype)
        if there != here:
            raise RunError(f"{name}: the checkpoint has {there}, the model {here}")
        _fill({name: row_piece(place)}, saved)


def _fill(views: dict[str, Piece], saved: SavedTensors, key: str = "") -> None:
    for name, piece in views.items():
        view, first = piece.tensor, piece.first
        view.copy_(saved.read_flat(f"{name}{key}", first, first + view.numel()).reshape(view.shape))


@torch.no_grad()
def load_state(
    stepped: list[Stepped], states: Any, saved: SavedTensors, own: Mapping[str, Any]
) -> None:
    """Put what an optimizer keeps into its `states`; `own` are values that no other rank needs."""
    keys = saved.keys()
    for number, each in enumerate(stepped):
        with each.held(True):
            one, to = min(each.cut(each.parameter)), each.parameter.detach()
            mine: dict[str, Any] = {}
            for full, value in own.items():
                if full.startswith(f"{number}@"):  # counters stay on the host
                    is_sized = isinstance(value, Tensor) and value.dim()
                    mine[full.partition("@")[2]] = value.to(to.device) if is_sized else value
            for key in keys.get(one, ()):
                full = f"{one}@{key}"
                if full in saved.numbers:
                    mine[key] = saved.numbers[full]
                elif not saved.shape(full):
                    mine[key] = saved.read(full).clone()
                elif key in (MASTER, TRAINING):
                    _fill(each.cut(to), saved, f"@{key}")
                else:
                    mine[key] = torch.zeros_like(to, dtype=saved.dtype(full))
                    _fill(each.cut(mine[key]), saved, f"@{key}")
            if MASTER in mine:
                to.copy_(mine.pop(MASTER))
            states[each.parameter] = mine


def of_one_file(content: dict[str, Any], names: list[str], copied: list[str]) -> SavedTensors:
    """What one process has written of its optimizer, by the names of the weights.

    `names` are in the order of the optimizer's parameters, `copied` in that of its float32 copies,
    if it is another.
    """
    states = content["optimizer"]
    values = {f"{names[n]}@{k}": v for n, s in states["state"].items() for k, v in s.items()}
    copies = zip(copied or names, states.get(MASTER, []), strict=False)
    values |= {f"{name}@{MASTER}": tensor for name, tensor in copies}
    training = zip(names, content["training_weights"], strict=False)
    values |= {f"{name}@{TRAINING}": tensor for name, tensor in training}
    return SavedTensors(values, states["param_groups"])
