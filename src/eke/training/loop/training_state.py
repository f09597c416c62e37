"""Training state: all objects of an attempt, built from the plan."""

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from eke.common.paths import RunPaths
from eke.plan.planner import Micro, Plan
from eke.plan.record import metrics
from eke.results.trackers import Tracker
from eke.training.batches.batches import CacheRelease, Transfer
from eke.training.batches.dataset import TrainingData, build_data, load_plan_tokenizer
from eke.training.distributed.deepspeed_engine import share_model
from eke.training.distributed.ranks import ALONE, Ranks, build_handlers, expect_unreached
from eke.training.loop.meter import Meter, RandomState, make_clock
from eke.training.loop.start import Built, build_device, start
from eke.training.loop.step import Stepped
from eke.training.loop.stop import StopFlag
from eke.training.model.adapters import experts_left_out, frozen_at_random
from eke.training.model.checkpointing import build_activation_offload
from eke.training.model.loss import LossFunction
from eke.training.model.number_formats import Formats, build_formats
from eke.training.model.save_model import build_trainable, name_classes
from eke.training.observe.memory_stages import memory_in_use
from eke.training.optimizer.build_optimizer import Multiplier, build_optimizer, build_schedule
from eke.training.optimizer.update import Update

log = logging.getLogger(__name__)


@dataclass
class TrainingState:
    """The objects of one attempt at one run."""

    plan: Plan
    paths: RunPaths
    attempt: int
    device: torch.device
    model: nn.Module
    """The model to call: wrapped for ranks, and compiled if configured."""
    bare_model: nn.Module
    """The same weights without wrappers: for checkpoints and for looking inside."""
    optimizer: torch.optim.Optimizer
    update: Update
    formats: Formats
    loss: LossFunction
    offload: AbstractContextManager[Any]
    """Context of each training forward pass: where what it saves for backward is kept."""
    cache_release: CacheRelease
    multiplier: Multiplier
    data: TrainingData
    transfer: Transfer
    meter: Meter
    stop: StopFlag
    start_step: int
    tracker: Tracker
    tokenizer: Any = None
    """Tokenizer of transformers, saved with the weights; None for bytes."""
    ranks: Ranks = ALONE
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
    longest: int | None = None
    """Which step of this attempt has the longest micro-batch, on a CPU; None until it is known."""
    largest: Micro | None = None
    """The largest micro-batch of the step in progress."""
    profiled: Micro | None = None
    """The same of the profiled step."""
    before_step: RandomState | None = None
    """Of the step in progress, where it may be given up."""
    peaks: list[int | None] | None = None
    """Peak of each rank's tensor allocator, where there are several."""

    @property
    def stepped(self) -> Stepped:
        """What takes part in a step."""
        return Stepped(
            self.model,
            self.loss,
            self.update,
            self.formats,
            self.offload,
            self.cache_release,
        )

    def warn(self, message: str) -> None:
        """Say something once, in the log of this rank and, on rank 0, in the record."""
        if message not in self.warnings:
            self.warnings.append(message)
            log.warning(message)

    def note_stage(self, stage: str) -> None:
        """Remember how much memory is in use at this stage."""
        used = memory_in_use(self.device)
        if used is not None:
            self.stages[stage] = used


def gap_in_the_curve(job: TrainingState) -> list[str]:
    """What to say where steps before the checkpoint are not in metrics.jsonl: rank 0 writes it."""
    missing = metrics.num_missing(job.paths.metrics, job.start_step) if job.ranks.is_main else 0
    if not missing:
        return []
    return [
        f"{job.paths.metrics.name} lacks {missing} of the {job.start_step} steps that the "
        "checkpoint has done: curve and timings are those of the others"
    ]


def torch_device(plan: Plan) -> torch.device:
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
    ranks: Ranks = ALONE,
) -> TrainingState:
    """Build model, data and optimizer, and continue from the newest complete checkpoint, if any."""
    device = torch_device(plan)
    meter.clock = make_clock(device)
    formats = build_formats(plan, device)
    # Precision and all else is eke's: an `accelerate launch` in front may not change it. It also
    # joins the group of processes, before anything is built.
    handlers = build_handlers(plan)
    accelerator = Accelerator(
        cpu=device.type == "cpu", mixed_precision="no", kwargs_handlers=handlers
    )
    bare, report = build_trainable(plan, build_device(plan, device))
    expect_unreached(plan, bare, accelerator)
    shared = share_model(plan, accelerator, bare, device, ranks)
    optimizer = build_optimizer(plan, bare)
    built = Built(plan, bare, shared, optimizer, formats, device, ranks)
    started = start(built, paths)
    meter.timed_from = started.step + plan.config.train.timing_warmup_steps
    job = TrainingState(
        plan=plan,
        paths=paths,
        attempt=attempt,
        device=device,
        model=started.model,
        bare_model=bare,
        optimizer=optimizer,
        update=started.update,
        formats=started.formats,
        loss=started.loss,
        offload=build_activation_offload(plan, bare),
        cache_release=CacheRelease(plan.config.memory.empty_cache_every, device),
        multiplier=build_schedule(plan),
        data=build_data(plan, left=report.padding == "left"),
        transfer=Transfer(device),
        meter=meter,
        stop=stop,
        start_step=started.step,
        tracker=tracker,
        tokenizer=load_plan_tokenizer(plan),
        ranks=ranks,
        parameters=built.parameters,
        stages=stages,
    )
    random = (*report.new_weights, *report.resized_weights)
    adapted = [*frozen_at_random(bare, random), *experts_left_out(bare)]
    headed = [*adapted, *name_classes(plan, bare, report)]
    for warning in (*report.warnings, *headed, *gap_in_the_curve(job)):
        job.warn(warning)
    job.note_stage("weights")
    return job
