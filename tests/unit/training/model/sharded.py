"""One rank's part of a model, without the other ranks: torch's process group that sends nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from unit.training.model.plans import hand_plan

from eke.plan.planner import Plan
from eke.training.distributed.fsdp import build_mesh, shard_model
from eke.training.model.build_model import build_model

CPU = torch.device("cpu")


@contextmanager
def among(world_size: int, rank: int) -> Iterator[None]:
    """As one of several ranks, none of which answers; gathered tensors hold no numbers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded_plan(num_processes: int, *overrides: str) -> Plan:
    """A plan of that many processes which share out the model."""
    plan = hand_plan(*overrides, "distributed=fsdp", f"distributed.num_processes={num_processes}")
    return replace(plan, batch=replace(plan.batch, world_size=num_processes))


def sharded_model(plan: Plan) -> nn.Module:
    """This rank's part of the plan's model; inside `among`."""
    model = build_model(plan, CPU)
    shard_model(plan, model, build_mesh(plan, CPU))
    return model
