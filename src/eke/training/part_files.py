"""Training state in parts: one safetensors file for each rank, read by any number of ranks.

A tensor in a file is a range of the numbers of a larger one (rows of it under FSDP2), or the rank's
own; the header says which, so that a reader takes what it needs from any of the files. Nothing in
a file can run code. Weights have the names of the model's `state_dict`; `NAME@KEY` is what an
optimizer keeps for one.
"""

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eke.common.errors import RunError

_DTYPES: dict[str, torch.dtype] = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **dict(BF16=torch.bfloat16, U8=torch.uint8, BOOL=torch.bool),
    **dict(F8_E4M3=torch.float8_e4m3fn, F8_E5M2=torch.float8_e5m2),
}
"""Source: https://github.com/huggingface/safetensors (Dtype in tensor.rs)."""

_BLOCK = 16 << 20
"""Bytes that are checked and written at once."""


@dataclass(frozen=True)
class Piece:
    """What one rank has of a tensor."""

    tensor: Tensor
    first: int = 0
    """Its first number's place in the whole tensor."""
    shape: tuple[int, ...] | None = None
    """Of the whole tensor; None if this is the rank's own."""


@dataclass
class Held:
    """What one rank writes of a checkpoint in parts."""

    pieces: dict[str, Piece]
    notes: dict[str, Any] = field(default_factory=dict)
    """JSON values, which may contain tensors."""
    rank: int = 0
    world_size: int = 1
    """Of those that write: with replicas, those of one."""
    writes: bool = True


def part_name(rank: int, world_size: int) -> str:
    """File of one rank's part."""
    return f"part-{rank:05d}-of-{world_size:05d}.safetensors"


def why_incomplete(names: Iterable[str]) -> str:
    """Which part the names of a checkpoint's files lack, or have too many; empty if none."""
    parts = {name for name in names if name.startswith("part-")}
    found = re.fullmatch(r"part-\d{5}-of-(\d{5})\.safetensors", max(parts, default=""))
    expected = {part_name(rank, int(found[1])) for rank in range(int(found[1]))} if found else set()
    odd = min(parts ^ expected, default="" if parts else "every part")
    return odd and (f"{odd} is of another checkpoint" if odd in parts else f"{odd} is missing")


def write_part(path: Path, held: Held, origin: Mapping[str, Any]) -> tuple[int, int]:
    """Write a new file, tensor by tensor, and make it durable; returns its size and its CRC-32.

    `origin` is the same on every rank, and other in every other checkpoint.
    """
    # Wide formats first, so that each tensor is aligned.
    pieces = sorted(held.pieces.items(), key=lambda item: (-item[1].tensor.itemsize, item[0]))
    formats = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {}
    end = 0
    for name, piece in pieces:
        start, end = end, end + piece.tensor.nbytes
        dtype, shape = formats[piece.tensor.dtype], list(piece.tensor.shape) or [1]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    places = {n: [p.first, *p.shape] for n, p in pieces if p.shape is not None}
    notes = {**held.notes, "origin": origin, "places": places}
    told = {key: json.dumps(value, default=Tensor.tolist) for key, value in notes.items()}
    text = json.dumps({**header, "__metadata__": told}).encode()
    text += b" " * (-len(text) % 8)
    checksum = zlib.crc32(begin := len(text).to_bytes(8, "little") + text)
    with open(path, "xb") as file:
        file.write(begin)
        for _, piece in pieces:
            flat = piece.tensor.detach().to("cpu").contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().data
            for at in range(0, len(data), _BLOCK):
                block = data[at : at + _BLOCK]
                checksum = zlib.crc32(block, checksum)
                file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return len(begin) + end, checksum


class SavedTensors:
    """Tensors by name, of which ranges can be read, and what else an optimizer keeps."""

    def __init__(self, values: Mapping[str, Any], groups: list[dict[str, Any]] | None) -> None:
        """Hold tensors, and by `NAME@KEY` other values; `groups` are the optimizer's."""
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        self.numbers = {name: value for name, value in values.items() if name not in tensors}
        self.groups = groups
        self.tied: dict[str, str] = {}
        """Other names of a tensor -> the name that it was written under."""
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._shares = {name: [(0, t.numel(), tensors)] for name, t in tensors.items()}

    @property
    def names(self) -> list[str]:
        """Of all tensors, in alphabetical order; each under one name."""
        return sorted(self._shapes)

    def keys(self) -> dict[str, list[str]]:
        """Name of a weight -> keys of what the optimizer keeps for it."""
        found: dict[str, list[str]] = {}
        for name in (*self.names, *self.numbers):
            weight, of_state, key = name.rpartition("@")
            if of_state:
                found.setdefault(weight, []).append(key)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._shapes[self._known(name)]

    def dtype(self, name: str) -> torch.dtype:
        """Format it was written in."""
        return _numbers(self._shares[self._known(name)][0][2], self._known(name), 0, 0).dtype

    def read_rows(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows `first` to `last` (exclusive) of a tensor; the number of one without rows."""
        shape = self.shape(name)
        row, last = prod(shape[1:]), (shape or (1,))[0] if last is None else last
        numbers = self.read_flat(name, first * row, last * row)
        return numbers.reshape(last - first, *shape[1:]) if shape else numbers.reshape(())

    def read_flat(self, name: str, first: int, last: int) -> Tensor:
        """Numbers `first` to `last` (exclusive) of a tensor; not to be changed, it may be a file's.

        Raises RunError: there is no such tensor.
        """
        name = self._known(name)
        found = [
            _numbers(file, name, max(first, start) - start, min(last, stop) - start)
            for start, stop, file in self._shares[name]
            if start < last and first < stop
        ]
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else torch.empty(0, dtype=self.dtype(name))

    def _known(self, name: str) -> str:
        weight, of_state, key = name.partition("@")
        name = f"{self.tied.get(weight, weight)}{of_state}{key}"
        if name not in self._shapes:
            raise RunError(f"the checkpoint has no tensor {name}")
        return name


class PartFiles(SavedTensors):
    """All parts of a checkpoint as one.

    Raises:
        RunError: a part is missing, damaged or of another checkpoint, or numbers are in no part.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        if why := why_incomplete(path.name for path in folder.glob("part-*")):
            raise RunError(f"{folder}: {why}")
        self._files: list[Any] = []
        for path in sorted(folder.glob("part-*.safetensors")):
            try:
                self._files.append(safe_open(path, "pt"))
            except SafetensorError as error:
                raise RunError(f"{path}: is damaged ({error})") from None
            if self.note("origin", len(self._files) - 1) != self.note("origin"):
                raise RunError(f"{path}: is of another checkpoint")
        self.world_size = len(self._files)
        """Of the ranks that wrote."""
        super().__init__({}, self.note("groups"))
        self.tied = self.note("tied") or {}
        for rank, file in enumerate(self._files):
            self.numbers |= self.note("numbers", rank) or {}
            for name, (start, *shape) in self.note("places", rank).items():
                stop = start + prod(file.get_slice(name).get_shape())
                self._shapes.setdefault(name, tuple(shape))
                self._shares.setdefault(name, []).append((start, stop, file))
        for name, shares in self._shares.items():
            shares.sort(key=lambda share: share[:2])
            ends = [0, *(stop for _, stop, _ in shares)]
            if [*(start for start, _, _ in shares), prod(self._shapes[name])] != ends:
                raise RunError(f"{folder}: the parts do not make up {name}")

    def note(self, key: str, rank: int = 0) -> Any:
        """A JSON value that this rank wrote; None if it did not."""
        return json.loads(self._files[rank].metadata().get(key, "null"))

    def own(self, rank: int) -> dict[str, Tensor]:
        """Tensors of one rank of those that wrote, which no other can use."""
        names = self._files[rank].keys() - self.note("places", rank).keys()
        return {name: self._files[rank].get_tensor(name) for name in sorted(names)}


def _numbers(file: Any, name: str, first: int, last: int) -> Tensor:
    """Numbers of a tensor in order, without reading a file's rows around them."""
    if isinstance(file, dict):
        held: Tensor = file[name]
        return held.reshape(-1)[first:last]
    stored = file.get_slice(name)
    row = prod(stored.get_shape()[1:])
    top = first // max(1, row)
    rows: Tensor = stored[top : -(-last // max(1, row))]
    return rows.reshape(-1)[first - top * row : last - top * row]
