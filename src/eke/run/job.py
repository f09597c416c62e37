"""Everything one training works with, built from the plan."""

import logging
from dataclasses import dataclass, field
from typing import Any

import accelerate.utils
import torch
from accelerate import Accelerator
from torch import nn

from eke.build.checkpointing import apply_checkpointing
from eke.build.compile import compile_model, unwrap
from eke.build.data import Data, build_data
from eke.build.masks import spare_mask_checks
from eke.build.model import build_model
from eke.build.optimizer import build_optimizer
from eke.build.precision import Formats, build_formats
from eke.build.schedule import Multiplier, build_schedule
from eke.paths import RunPaths
from eke.plan import Plan
from eke.run.checkpoint import load_checkpoint, newest_complete
from eke.run.memory import memory_in_use
from eke.run.meter import Meter, make_clock
from eke.run.stop import StopFlag
from eke.track import Tracker

log = logging.getLogger(__name__)


@dataclass
class Job:
    """The objects of one attempt at one run."""

    plan: Plan
    paths: RunPaths
    attempt: int
    device: torch.device
    accelerator: Accelerator
    model: nn.Module
    """As it is called: prepared, and compiled where that was asked for."""
    bare_model: nn.Module
    """The same weights without wrappers: for checkpoints and for looking inside."""
    optimizer: torch.optim.Optimizer
    formats: Formats
    multiplier: Multiplier
    data: Data
    meter: Meter
    stop: StopFlag
    start_step: int
    tracker: Tracker
    parameters: list[nn.Parameter] = field(default_factory=list)
    """The trainable ones."""
    stages: dict[str, int] = field(default_factory=dict)
    """Memory in use after each of the guides' stages."""
    effective: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    eval_s: float = 0.0
    checkpoint_s: float = 0.0
    profiled_peak: int | None = None
    """Peak of the CPU's tensor allocator in the profiled step."""

    def warn(self, message: str) -> None:
        """Say something once, in the log and in the record."""
        if message not in self.warnings:
            self.warnings.append(message)
            log.warning(message)

    def note_stage(self, stage: str) -> None:
        """Remember how much memory is in use at this stage."""
        used = memory_in_use(self.device)
        if used is not None:
            self.stages[stage] = used


def choose_device(plan: Plan) -> torch.device:
    """Torch's device for the plan.

    Raises:
        RuntimeError: a GPU was planned and torch does not see one.
    """
    if plan.device.kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"the plan is for {plan.device.name}, but this torch ({torch.__version__}) sees no GPU"
        )
    return torch.device("cuda", torch.cuda.current_device())


def build_job(
    plan: Plan,
    paths: RunPaths,
    attempt: int,
    stop: StopFlag,
    tracker: Tracker,
    meter: Meter,
    stages: dict[str, int],
) -> Job:
    """Build model, data and optimizer, and continue from the newest complete checkpoint, if any."""
    device = choose_device(plan)
    meter.clock = make_clock(device)
    accelerator = Accelerator(cpu=device.type == "cpu")
    formats = build_formats(plan, device)
    bare = build_model(plan, device)
    spare_mask_checks(bare)
    apply_checkpointing(plan, bare)
    optimizer = build_optimizer(plan, bare)
    accelerate.utils.set_seed(plan.config.seed)  # dropout; a checkpoint brings its own states
    start_step = _resume(paths, bare, optimizer, formats)
    model = compile_model(plan, accelerator.prepare_model(bare))
    meter.timed_from = start_step + plan.config.train.timing_warmup_steps
    job = Job(
        plan=plan,
        paths=paths,
        attempt=attempt,
        device=device,
        accelerator=accelerator,
        model=model,
        bare_model=unwrap(model),
        optimizer=optimizer,
        formats=formats,
        multiplier=build_schedule(plan),
        data=build_data(plan),
        meter=meter,
        stop=stop,
        start_step=start_step,
        tracker=tracker,
        parameters=[p for p in bare.parameters() if p.requires_grad],
        stages=stages,
    )
    job.note_stage("weights")
    return job


def _resume(
    paths: RunPaths, model: nn.Module, optimizer: torch.optim.Optimizer, formats: Formats
) -> int:
    checkpoint = newest_complete(paths.checkpoints)
    if checkpoint is None:
        return 0
    step = load_checkpoint(checkpoint, model, optimizer, formats.scaler)
    log.info("continuing after step %d (%s)", step, checkpoint.name)
    return step
