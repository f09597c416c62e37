"""Training state in parts: one safetensors file for each rank, read by any number of ranks.

A tensor in a file is rows of a larger one (FSDP2), a range of its numbers (ZeRO), or the rank's
own. The header says which of them, so that a reader takes what it needs from any of the files.
Nothing in a file can run code.

Weights have the names of the model's `state_dict`; `NAME@KEY` is what an optimizer keeps for one.
"""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eke.common.errors import RunError

ROWS, FLAT, OWN = "rows", "flat", "own"
"""Kinds of a piece: rows of a tensor, numbers of a tensor in order, all of a rank's own tensor."""

STATE_KEY = "@"
"""Between a weight's name and the key of its optimizer state."""

_DTYPES: dict[str, torch.dtype] = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Source: https://github.com/huggingface/safetensors (Dtype in tensor.rs)."""

_BLOCK = 16 << 20
"""Bytes that are checked and written at once."""


@dataclass(frozen=True)
class Piece:
    """What one rank has of a tensor."""

    tensor: Tensor
    kind: str = OWN
    first: int = 0
    """First row, or first number."""
    shape: tuple[int, ...] = ()
    """Of the whole tensor."""


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


def write_part(
    path: Path, pieces: Mapping[str, Piece], origin: Mapping[str, Any], **more: Any
) -> tuple[int, int]:
    """Write a new file, one tensor after the other, and make it durable.

    Args:
        path: where no file is yet.
        pieces: by name; on any device.
        origin: the same on every rank, and other in every other checkpoint.
        more: JSON values that a reader gets from `PartFiles.note`.

    Returns:
        The file's size in bytes, and its CRC-32.
    """
    # Wide formats first, so that each tensor is aligned.
    names = sorted(pieces, key=lambda name: (-pieces[name].tensor.itemsize, name))
    formats = {dtype: name for name, dtype in _DTYPES.items()}
    places: dict[str, dict[str, list[int]]] = {ROWS: {}, FLAT: {}, OWN: {}}
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        piece = pieces[name]
        start, end = end, end + piece.tensor.nbytes
        size, dtype = list(piece.tensor.shape), formats[piece.tensor.dtype]
        header[name] = {"dtype": dtype, "shape": size, "data_offsets": [start, end]}
        places[piece.kind][name] = [piece.first, *piece.shape]
    notes = {**places, **more, "origin": dict(origin)}
    header["__metadata__"] = {key: json.dumps(value) for key, value in notes.items()}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum = zlib.crc32(begin := len(text).to_bytes(8, "little") + text)
    with open(path, "xb") as file:
        file.write(begin)
        for name in names:
            flat = pieces[name].tensor.detach().to("cpu").contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().data
            for at in range(0, len(data), _BLOCK):
                block = data[at : at + _BLOCK]
                checksum = zlib.crc32(block, checksum)
                file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return len(begin) + end, checksum


@dataclass(frozen=True)
class _Share:
    """Where numbers of a tensor are."""

    start: int
    stop: int
    file: Any


class PartFiles:
    """All parts of a checkpoint as one.

    Raises:
        RunError: a part is missing, damaged or of another checkpoint, or numbers are in no part.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
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
        self.tied: dict[str, str] = self.note("tied") or {}
        """Other names of a tensor -> the name that it was written under."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._shares: dict[str, list[_Share]] = {}
        self._find_shares()

    def note(self, key: str, rank: int = 0) -> Any:
        """A JSON value that this rank wrote; None if it did not."""
        text = self._files[rank].metadata().get(key)
        return None if text is None else json.loads(text)

    @cached_property
    def names(self) -> list[str]:
        """Of all tensors that are in pieces, in alphabetical order; each under one name."""
        return sorted(self._shapes)

    @cached_property
    def digest(self) -> str:
        """Equal where ranks see the same files."""
        headers = [sorted(file.metadata().items()) for file in self._files]
        return hashlib.sha256(repr(headers).encode()).hexdigest()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._shapes[self._known(name)]

    def dtype(self, name: str) -> torch.dtype:
        """Format it was written in."""
        name = self._known(name)
        return _DTYPES[self._shares[name][0].file.get_slice(name).get_dtype()]

    def own(self, rank: int) -> dict[str, Tensor]:
        """Tensors of one rank of those that wrote."""
        file = self._files[rank]
        return {name: file.get_tensor(name) for name in self.note(OWN, rank)}

    def read_rows(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows `first` to `last` (exclusive) of a tensor; all of it where it has no rows."""
        shape = self.shape(name)
        if not shape:
            return self.read_flat(name, 0, 1).reshape(())
        row, last = prod(shape[1:]), shape[0] if last is None else last
        return self.read_flat(name, first * row, last * row).reshape(last - first, *shape[1:])

    def read_flat(self, name: str, first: int, last: int) -> Tensor:
        """Numbers `first` to `last` (exclusive) of a tensor; a view of the file if one has all."""
        name = self._known(name)
        shares = [s for s in self._shares[name] if s.start < last and first < s.stop]
        found = [
            _numbers(s.file, name, max(first, s.start) - s.start, min(last, s.stop) - s.start)
            for s in shares
        ]
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else torch.empty(0, dtype=self.dtype(name))

    def _known(self, name: str) -> str:
        name = self.tied.get(name, name)
        if name not in self._shapes:
            raise RunError(f"{self.folder}: has no tensor {name}")
        return name

    def _find_shares(self) -> None:
        """Read all headers; every number of a tensor must be in one part."""
        for rank, file in enumerate(self._files):
            for kind in (ROWS, FLAT):
                for name, (first, *size) in self.note(kind, rank).items():
                    shape = self._shapes.setdefault(name, tuple(size))
                    start = first * (prod(shape[1:]) if kind == ROWS else 1)
                    stop = start + prod(file.get_slice(name).get_shape())
                    self._shares.setdefault(name, []).append(_Share(start, stop, file))
                    if shape != tuple(size):
                        raise RunError(f"{self.folder}: {name} is {shape} and {tuple(size)}")
        for name, shares in self._shares.items():
            shares.sort(key=lambda share: (share.start, share.stop))
            ends = [0, *(share.stop for share in shares)]
            starts = [*(share.start for share in shares), prod(self._shapes[name])]
            if starts != ends:
                raise RunError(f"{self.folder}: the parts do not make up {name}")


def _numbers(file: Any, name: str, first: int, last: int) -> Tensor:
    """Numbers of a tensor in a file, in order, without reading the rows around them."""
    stored = file.get_slice(name)
    if not (shape := stored.get_shape()):
        whole: Tensor = file.get_tensor(name)
        return whole.reshape(1)[first:last]
    row = prod(shape[1:])
    top = first // row
    rows: Tensor = stored[top : -(-last // row)]
    return rows.reshape(-1)[first - top * row : last - top * row]
