"""Start of training: load the checkpoint, shard and compile the model."""

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import accelerate.utils
import torch
from torch import nn

from eke.common.paths import RunPaths
from eke.plan.planner import Plan, remove_swap, swap_folder
from eke.training.checkpoint import EXPORT, load_checkpoint, load_part, newest_complete
from eke.training.distributed.deepspeed_engine import DeepSpeedUpdate, share_update
from eke.training.distributed.ranks import Ranks, build_data_parallel
from eke.training.model.loss import LossFunction, build_loss
from eke.training.model.number_formats import Formats, compile_model
from eke.training.model.save_model import load_weights
from eke.training.optimizer.update import PlainUpdate, Update

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """What `start` begins with, on one rank."""

    plan: Plan
    model: nn.Module
    """Without wrappers."""
    shared: nn.Module
    """The same, as ranks share it."""
    optimizer: torch.optim.Optimizer
    formats: Formats
    device: torch.device
    ranks: Ranks

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable ones."""
        return [p for p in self.model.parameters() if p.requires_grad]


@dataclass(frozen=True)
class Started:
    """A model ready for its next step."""

    model: nn.Module
    """As it is called."""
    loss: LossFunction
    update: Update
    formats: Formats
    step: int
    """Optimizer steps done already."""


def build_device(plan: Plan, device: torch.device) -> torch.device:
    """Where weights are made: ZeRO-3 makes them on the host, lest a device hold all of them."""
    stage = plan.deepspeed["zero_optimization"]["stage"] if plan.deepspeed else 0
    return torch.device("cpu") if stage == 3 else device


def start(built: Built, paths: RunPaths) -> Started:
    """Continue from the newest complete checkpoint, if any, and share the model out as planned."""
    found = newest_complete(paths.checkpoints) if built.ranks.is_main else None
    checkpoint = built.ranks.tell(found)  # all continue from the same one
    begin = _start_plain if built.plan.deepspeed is None else _start_deepspeed
    started = begin(built, checkpoint, paths)
    if checkpoint is not None:
        log.info("continuing after step %d (%s)", started.step, checkpoint.name)
    return started


def seed_dropout(built: Built) -> None:
    """Other masks on other ranks; a checkpoint brings its own states."""
    accelerate.utils.set_seed((built.plan.config.seed + built.ranks.rank) % 2**32)


def _start_plain(built: Built, checkpoint: Path | None, _: RunPaths) -> Started:
    plan, model, formats = built.plan, built.model, built.formats
    seed_dropout(built)
    step = 0
    if checkpoint is not None:
        step = load_checkpoint(checkpoint, model, built.optimizer, formats.scaler, built.ranks.rank)
    called, loss = compile_model(plan, built.shared), build_loss(plan)
    if plan.config.distributed.option == "dp":  # one module, computed on each device of this rank
        called, loss = build_data_parallel(plan, called, loss, formats)
    plain = PlainUpdate(plan, called, built.optimizer, formats.scaler, built.parameters)
    return Started(called, loss, share_update(plan, plain, model, built.ranks), formats, step)


def _start_deepspeed(built: Built, checkpoint: Path | None, paths: RunPaths) -> Started:
    """Weights come before they are shared out, the rest into what the engine has made of it."""
    from eke.training.distributed.deepspeed_engine import build_engine

    if checkpoint is not None:
        load_weights(built.model, checkpoint / EXPORT)
    swap = swap_folder(built.plan, paths)
    remove_swap(swap, built.ranks.rank)  # of an attempt that was killed
    engine = build_engine(
        built.plan, built.model, built.optimizer, built.formats, built.device, swap
    )
    update = DeepSpeedUpdate(built.plan, engine, built.device)
    seed_dropout(built)
    step = load_part(checkpoint, update, built.ranks) if checkpoint is not None else 0
    # The engine has its own autocast and loss scale.
    formats = Formats(nullcontext, nullcontext, None)
    return Started(engine, build_loss(built.plan), update, formats, step)
