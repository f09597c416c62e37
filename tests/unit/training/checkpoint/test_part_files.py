"""Parts of a training state: written by any number of ranks, read by any other."""

import json
import zlib
from math import prod

import pytest
import torch
from safetensors.torch import load_file

from eke.common.errors import RunError
from eke.training.part_files import Held, PartFiles, Piece, part_name, write_part

ROWS, FLAT = "rows", "numbers"
SHAPES = ((1,), (2, 3), (5, 2), (7, 1, 2), (211,), (97, 3), (), (3, 0), (0, 4))


def numbers(shape, dtype=torch.float32):
    return torch.arange(prod(shape), dtype=torch.float64).reshape(shape).to(dtype)


def cut(tensor, kind, rank, world_size):
    """This rank's piece of a tensor, and its rows or numbers; the last ones are short or empty."""
    if not tensor.dim():
        return ({0: Piece(tensor, 0, ())}.get(rank), range(1 - min(rank, 1)))
    flat = tensor if kind == ROWS else tensor.reshape(-1)
    size = -(-len(flat) // world_size)
    mine = range(len(flat))[rank * size : (rank + 1) * size]
    first = mine.start * (prod(tensor.shape[1:]) if kind == ROWS else 1)
    return Piece(flat[mine.start : mine.stop], first, tuple(tensor.shape)), mine


def write(folder, world_size, kind=ROWS, tensors=None, run="a"):
    folder.mkdir(exist_ok=True)
    tensors = tensors or {f"t{n}": numbers(s) for n, s in enumerate(SHAPES)}
    for rank in range(world_size):
        found = {name: cut(tensor, kind, rank, world_size)[0] for name, tensor in tensors.items()}
        pieces = {name: piece for name, piece in found.items() if piece is not None}
        pieces["mine"] = Piece(torch.full((2,), rank))
        held = Held(pieces, {"said": torch.tensor([rank])})
        written = write_part(folder / part_name(rank, world_size), held, run)
        content = (folder / part_name(rank, world_size)).read_bytes()
        assert written == (len(content), zlib.crc32(content))
    return tensors


@pytest.mark.parametrize("kind", [ROWS, FLAT])
@pytest.mark.parametrize("readers", [1, 2, 3, 7])
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_any_rank_count_reads_any_shards(writers, readers, kind, tmp_path) -> None:
    tensors = write(tmp_path, writers, kind)
    parts = PartFiles(tmp_path)
    assert parts.names == sorted(tensors)
    assert parts.world_size == writers
    for name, tensor in tensors.items():
        assert parts.shape(name) == tensor.shape
        assert torch.equal(parts.read(name), tensor)
        for rank in range(readers):
            for asked in (ROWS, FLAT):
                piece, _ = cut(tensor, asked, rank, readers)
                if piece is not None:
                    last = piece.first + piece.tensor.numel()
                    read = parts.read_flat(name, piece.first, last)
                    assert torch.equal(read, piece.tensor.reshape(-1))


def test_each_rank_has_its_own_tensors_and_metadata(tmp_path) -> None:
    write(tmp_path, 3)
    parts = PartFiles(tmp_path)
    assert [parts.own(rank)["mine"].tolist() for rank in range(3)] == [[0, 0], [1, 1], [2, 2]]
    assert [parts.note("said", rank) for rank in range(3)] == [[0], [1], [2]]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.bool]
)
def test_shards_keep_formats_and_are_read_by_safetensors(dtype, tmp_path) -> None:
    tensors = {"odd": numbers((3,), torch.uint8), "a": numbers((5, 3), dtype), "b": numbers((2,))}
    write(tmp_path, 1, tensors=tensors)
    assert PartFiles(tmp_path).dtype("a") is dtype
    loaded = load_file(tmp_path / part_name(0, 1))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_noncontiguous_view_is_written_in_order(tmp_path) -> None:
    write(tmp_path, 1, tensors={"t": numbers((4, 6)).T})
    assert torch.equal(PartFiles(tmp_path).read("t"), numbers((4, 6)).T)


def test_tied_tensor_is_read_by_each_name(tmp_path) -> None:
    held = Held({"table": Piece(numbers((3,)), 0, (3,))}, {"tied": {"head": "table"}})
    write_part(tmp_path / part_name(0, 1), held, "")
    assert PartFiles(tmp_path).read_flat("head", 1, 3).tolist() == [1, 2]


def remove(folder):
    (folder / part_name(1, 3)).unlink()


def shorten(folder):
    path = folder / part_name(1, 3)
    path.write_bytes(path.read_bytes()[:-1])


def empty(folder):
    (folder / part_name(1, 3)).write_bytes(b"")


def of_another(folder):
    write(folder / "other", 3, run="b")
    (folder / "other" / part_name(1, 3)).replace(folder / part_name(1, 3))


def of_fewer(folder):
    write_part(folder / part_name(0, 1), Held({}), "a")


def without_rows(folder):
    path = folder / part_name(1, 3)
    path.unlink()
    write_part(path, Held({}), "a")


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (remove, part_name(1, 3)),
        (shorten, part_name(1, 3)),
        (empty, part_name(1, 3)),
        (of_another, part_name(1, 3)),
        (of_fewer, "part-0000"),
        (without_rows, "gaps or overlap"),
    ],
    ids=lambda value: getattr(value, "__name__", "named"),
)
def test_damaged_shard_is_named(harm, named, tmp_path) -> None:
    write(tmp_path, 3)
    PartFiles(tmp_path)
    harm(tmp_path)
    with pytest.raises(RunError, match=named):
        PartFiles(tmp_path)


def test_folder_without_shards_is_rejected(tmp_path) -> None:
    with pytest.raises(RunError, match="every part is missing"):
        PartFiles(tmp_path)


def test_shard_header_holds_positions(tmp_path) -> None:
    write(tmp_path, 2, FLAT, {"w": numbers((3, 2))})
    file = (tmp_path / part_name(1, 2)).read_bytes()
    length = int.from_bytes(file[:8], "little")
    notes = json.loads(file[8 : 8 + length])["__metadata__"]
    assert json.loads(notes["places"]) == {"w": [3, 3, 2]}
