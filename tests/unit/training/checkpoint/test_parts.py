"""Flat shards of ZeRO: as eke 0.10 saved them, and states that only their own rank can read."""

import pytest
import torch
from unit.training.checkpoint.test_checkpoint import make

from eke.common.errors import RunError
from eke.config.compose import compose
from eke.rules.distributed import why_not_elastic
from eke.training.checkpoint import (
    EXPORT,
    begin_checkpoint,
    find_damage,
    finish_checkpoint,
    load_checkpoint,
    load_model,
    newest_complete,
)
from eke.training.distributed.ranks import Ranks
from eke.training.loop.meter import capture_random_state
from eke.training.model.save_model import save_pretrained
from eke.training.part_files import Held, Piece, part_name, write_part
from eke.training.state_parts import Stepped, hold_state


class Flat:
    """An engine's update with one flat shard."""

    def __init__(self) -> None:
        self.shard = torch.nn.Parameter(torch.zeros(3))

    def stepped(self, model):
        return [Stepped(self.shard, lambda tensor: {"w": Piece(tensor, 0, (3,))})]


def former(folder, step, ranks=2):
    """A checkpoint of ZeRO with a master copy, in the layout of eke 0.10."""
    unfinished = folder / f".step-{step:08d}.1.tmp"
    begin_checkpoint(unfinished)
    save_pretrained(make()[0], unfinished / EXPORT)
    for rank in range(ranks):
        content = {
            "optimizer": [{"exp_avg": torch.full((3,), float(rank)), "step": torch.tensor(4.0)}],
            "master": [torch.full((3,), 7.0)],
            "loss_scale": {},
            "random": capture_random_state(),
        }
        torch.save(content, unfinished / f"optimizer-{rank:05d}-of-{ranks:05d}.pt")
    return finish_checkpoint(unfinished, step, keep=2, world_size=ranks)


def load(path, rank, world_size):
    model, update = make()[0], Flat()
    optimizer = torch.optim.AdamW([update.shard])
    load_model(path, model)
    step = load_checkpoint(path, model, optimizer, None, Ranks(rank, world_size), 0, update)
    return step, update.shard, optimizer.state[update.shard]


def test_same_rank_count_reads_its_shards(tmp_path) -> None:
    path = former(tmp_path, 3)
    assert newest_complete(tmp_path) == path
    step, shard, state = load(path, 1, 2)
    assert step == 3
    assert shard.tolist() == [7.0] * 3
    assert state["exp_avg"].tolist() == [1.0] * 3
    assert float(state["step"]) == 4


def test_different_rank_count_is_rejected_with_the_right_count(tmp_path) -> None:
    with pytest.raises(RunError, match=r"distributed.num_processes=2"):
        load(former(tmp_path, 3), 0, 3)


def test_missing_or_damaged_shard_is_detected(tmp_path) -> None:
    first, second = former(tmp_path, 3), former(tmp_path, 6)
    part = second / "optimizer-00001-of-00002.pt"
    part.write_bytes(b"torn")
    assert part.name in find_damage(second)
    assert newest_complete(tmp_path) == first


def in_blocks(folder, ranks):
    """A checkpoint in parts whose moments are codes, with a scale for each block of a shard."""
    unfinished = folder / ".step-00000004.1.tmp"
    begin_checkpoint(unfinished)
    for rank in range(ranks):
        update, states = Flat(), {}
        codes = torch.full((3,), rank, dtype=torch.uint8)
        states[update.shard] = {"state1": codes, "absmax1": torch.full((1,), 0.5), "step": 4}
        held = hold_state(Held({}, {}, rank, ranks), update.stepped(None), states)
        held.notes |= {"random": {}, "scaler": {}}
        write_part(unfinished / part_name(rank, ranks), held, "one")
    return finish_checkpoint(unfinished, 4, keep=2, world_size=ranks)


def test_blockwise_states_require_the_same_rank_count(tmp_path) -> None:
    path = in_blocks(tmp_path, 2)
    update = Flat()
    optimizer = torch.optim.AdamW([update.shard])
    assert load_checkpoint(path, make()[0], optimizer, None, Ranks(1, 2), 0, update) == 4
    state = optimizer.state[update.shard]
    assert (state["state1"].tolist(), state["absmax1"].tolist(), state["step"]) == (
        [1] * 3,
        [0.5],
        4,
    )
    with pytest.raises(RunError, match=r"distributed.num_processes=2"):
        load_checkpoint(path, make()[0], optimizer, None, Ranks(0, 3), 0, Flat())


@pytest.mark.parametrize(
    ("optimizer", "distributed", "can"),
    [("adamw_8bit", "zero2", False), ("adamw", "zero2", True), ("muon", "fsdp", True),
     ("adamw_8bit", "ddp", True)],
)  # fmt: skip
def test_states_bound_to_their_rank_count_are_detected(optimizer, distributed, can) -> None:
    config = compose([f"optimizer={optimizer}", f"distributed={distributed}"]).config
    assert (why_not_elastic(config) == "") is can
