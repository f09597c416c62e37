"""Checkpoints of several parts: complete or not there, and for as many ranks as wrote them."""

import dataclasses
import errno
import json

import pytest
import torch
from unit.training.checkpoint.test_checkpoint import make

from eke.common.errors import RunError
from eke.training.checkpoint import (
    CHECKPOINT_FILES,
    find_damage,
    load_part,
    newest_complete,
    part_name,
    save_parts,
)
from eke.training.distributed.ranks import ALONE, Ranks


class Part:
    """An update that holds one tensor."""

    def __init__(self, value: float = 0.0) -> None:
        self.state = torch.full((3,), value)

    def weights(self, keep):
        return None

    def part(self):
        return {"state": self.state}

    def load_part(self, part):
        self.state = part["state"]


def save(folder, step=3, value=1.0):
    save_parts(folder, step, make()[0], Part(value), keep=2, ranks=ALONE)
    return newest_complete(folder)


def test_what_was_saved_is_loaded(tmp_path) -> None:
    path = save(tmp_path, value=7.0)
    update = Part()
    torch.manual_seed(1)
    assert load_part(path, update, ALONE) == 3
    assert update.state.tolist() == [7.0] * 3


def test_a_part_that_is_missing_or_harmed_is_noticed(tmp_path) -> None:
    first, second = save(tmp_path, 3), save(tmp_path, 6)
    (second / part_name(0, 1)).write_bytes(b"torn")
    assert "optimizer-00000-of-00001.pt" in find_damage(second)
    assert newest_complete(tmp_path) == first


def test_a_manifest_without_all_parts_is_incomplete(tmp_path) -> None:
    path = save(tmp_path)
    (path / part_name(0, 1)).rename(path / part_name(0, 2))
    manifest = json.loads((path / CHECKPOINT_FILES).read_text())
    manifest[part_name(0, 2)] = manifest.pop(part_name(0, 1))
    (path / CHECKPOINT_FILES).write_text(json.dumps(manifest))
    assert find_damage(path) == "the manifest is incomplete"


def test_other_numbers_of_ranks_are_refused_with_the_right_one(tmp_path) -> None:
    path = save(tmp_path)
    with pytest.raises(RunError, match=r"continue with distributed.num_processes=1"):
        load_part(path, Part(), Ranks(0, 2))


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch) -> None:
    first = save(tmp_path)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("eke.training.checkpoint.torch.save", full)
    with pytest.raises(OSError, match="No space left"):
        save_parts(tmp_path, 6, make()[0], Part(), keep=2, ranks=ALONE)
    assert [p.name for p in tmp_path.iterdir()] == [first.name]


@dataclasses.dataclass(frozen=True)
class OtherFails(Ranks):
    """Rank 0 of two, the other of which has just met a full disk."""

    def tell(self, value):
        return value

    def gather(self, value):
        return [value, (errno.ENOSPC, "No space left on device", "step-00000006")]


def test_trouble_of_another_rank_is_raised_here_too(tmp_path) -> None:
    first = save(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        save_parts(tmp_path, 6, make()[0], Part(), keep=2, ranks=OtherFails(0, 2))
    assert [p.name for p in tmp_path.iterdir()] == [first.name]
