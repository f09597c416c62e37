"""Conversion between a rank's training state and the pieces of a checkpoint.

`NAME` is Schedule-Free's average weight, `NAME@training` its training weight, and `NAME@master` the
float32 copy of a 16-bit weight.
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
from eke.training.distributed.fsdp import local_tensor
from eke.training.distributed.parts import rows
from eke.training.model.adapters import is_adapted
from eke.training.model.number_formats import MASTER, copied_from
from eke.training.optimizer.build_optimizer import evaluation_weights
from eke.training.part_files import Held, Piece, SavedTensors

_TRAINING = "training"


def named_weights(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the saved weights of a model (only trained ones with adapters), and their other names.

    Collective: FSDP2 first shards weights that an evaluation has gathered.
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


def _place_of(tensor: Tensor) -> tuple[int, int, bool]:
    """Return rank and number of the ranks that share a tensor, and whether this rank writes it."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return 0, 1, True
    *copy, rank = tensor.device_mesh.get_coordinate() or [0]  # "shard" is last (`build_mesh`)
    return rank, tensor.device_mesh.size(len(copy)), not any(copy)


def place_in(model: nn.Module) -> tuple[int, int, bool]:
    """Return `_place_of` for the sharded tensors of a model."""
    return max(map(_place_of, model.parameters()), key=lambda place: place[1])


def row_piece(tensor: Tensor, rank: int = 0, world_size: int = 1) -> Piece:
    """Return a view of this rank's rows of a sharded tensor, or of its share of a full tensor."""
    cut = _place_of(tensor)[1] > 1
    rank, world_size = _place_of(tensor)[:2] if cut else (rank, world_size)
    shape = tuple(tensor.shape)
    local = local_tensor(tensor.detach())
    local = local if shape else local.reshape(-1)
    mine = rows((*shape, 1)[0], rank, world_size)
    return Piece(local if cut else local[mine], mine.start * prod(shape[1:]), shape)


@dataclass(frozen=True)
class Stepped:
    """Parameter of an optimizer, and the weights whose elements it contains."""

    parameter: Tensor
    cut: Callable[[Tensor], dict[str, Piece]]
    """Function from a tensor of the parameter's size to this rank's elements, by weight."""
    is_copy: bool = False
    """True if the parameter is a float32 copy of weights in another format."""
    held: Callable[[bool], AbstractContextManager[bool]] = lambda write: nullcontext(False)
    """Context that loads the parameter, to be written if true, and yields whether it was loaded."""


def stepped_by(model: nn.Module, optimizer: Optimizer, *place: int) -> list[Stepped]:
    """Return an optimizer's parameters, each of which is one weight of the model or its copy.

    `place`: rank and number of ranks that share each full tensor. Default: one rank.
    """
    names = {id(tensor): name for name, tensor in named_weights(model)[0].items()}
    copied = copied_from(optimizer)

    def cut(name: str) -> Callable[[Tensor], dict[str, Piece]]:
        return lambda tensor: {name: row_piece(tensor, *place)}

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [Stepped(p, cut(names[id(copied.get(p, p))]), p in copied) for p in parameters]


def hold(model: nn.Module, optimizer: Optimizer) -> Held:
    """Return weights and optimizer state of a model sharded by FSDP2."""
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
        held.pieces |= {f"{name}@{_TRAINING}": p for name, p in each.cut(tensor).items()}
    groups = [
        {k: v for k, v in group.items() if isinstance(v, int | float)}
        for group in optimizer.param_groups
    ]
    return hold_state(held, stepped, optimizer.state, groups)


def hold_state(
    held: Held, stepped: list[Stepped], states: Mapping[Any, Any], groups: Any = None
) -> Held:
    """Add optimizer state to a rank's weights."""
    held.notes |= {"numbers": {}, "groups": groups}
    for number, each in enumerate(stepped):
        with each.held(False) as borrowed:
            state = {**states.get(each.parameter, {})}
            if each.is_copy:
                state[MASTER] = each.parameter
            sized = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim()}
            own = any(v.shape != each.parameter.shape for v in sized.values())  # block scales
            for key, value in sized.items():
                found = {str(number): Piece(value)} if own else each.cut(value)
                for name, piece in found.items():
                    if piece.tensor.numel():
                        kept = piece.tensor.clone() if borrowed else piece.tensor
                        held.pieces[f"{name}@{key}"] = replace(piece, tensor=kept)
            for name, piece in each.cut(each.parameter).items():
                if piece.first or not piece.tensor.numel():
                    continue  # the rank with the first element writes scalars
                for key in state.keys() - sized:
                    if isinstance(value := state[key], Tensor):
                        held.pieces[f"{name}@{key}"] = Piece(value, 0, ())
                    else:
                        held.notes["numbers"][f"{name}@{key}"] = value
    return held


@torch.no_grad()
def load_held(model: nn.Module, saved: SavedTensors) -> None:
    """Load the saved weights into a model, sharded or not. RunError: They do not match."""
    places, tied = named_weights(model)
    for name in saved.names:
        if "@" not in name and name not in places and name not in tied:
            raise RunError(f"{name} is not a tensor of {type(model).__name__}")
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
    """Load optimizer state into `states`. `own` contains values of this rank only."""
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
                elif key in (MASTER, _TRAINING):
                    _fill(each.cut(to), saved, f"@{key}")
                else:
                    mine[key] = torch.zeros_like(to, dtype=saved.dtype(full))
                    _fill(each.cut(mine[key]), saved, f"@{key}")
            if MASTER in mine:
                to.copy_(mine.pop(MASTER))
            states[each.parameter] = mine


def of_one_file(content: dict[str, Any], names: list[str], copied: list[str]) -> SavedTensors:
    """Return the optimizer state of one process, by names of the parameters and of their copies."""
    states = content["optimizer"]
    values = {f"{names[n]}@{k}": v for n, s in states["state"].items() for k, v in s.items()}
    copies = zip(copied or names, states.get(MASTER, []), strict=False)
    values |= {f"{name}@{MASTER}": tensor for name, tensor in copies}
    training = zip(names, content["training_weights"], strict=False)
    values |= {f"{name}@{_TRAINING}": tensor for name, tensor in training}
    return SavedTensors(values, states["param_groups"])
