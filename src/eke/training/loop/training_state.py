"""Training state: all objects of an attempt, built from the plan."""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate.utils
import torch
from accelerate import Accelerator
from torch import nn

from eke.common.paths import RunPaths
from eke.models.families import family_of
from eke.plan.planner import MicroBatchShape, Plan, remove_swap, swap_folder
from eke.plan.record import metrics
from eke.results.trackers import Tracker
from eke.training.batches.batches import CacheRelease, Transfer
from eke.training.batches.dataset import TrainingData, build_data, load_plan_tokenizer
from eke.training.batches.tasks import is_packed
from eke.training.checkpoint import Saving, load_checkpoint, load_model, newest_complete
from eke.training.custom.callbacks import OwnCallbacks
from eke.training.distributed.deepspeed_engine import (
    DeepSpeedUpdate,
    ShardedUpdate,
    build_engine,
    parts_of,
    share_model,
)
from eke.training.distributed.parts import Parts
from eke.training.distributed.ranks import (
    SINGLE_PROCESS,
    Ranks,
    allow_unused_experts,
    build_data_parallel,
    build_handlers,
)
from eke.training.loop.meter import Clock, Meter, RandomState
from eke.training.loop.stop import StopFlag
from eke.training.model.activation_offload import build_activation_offload
from eke.training.model.adapters import warn_random_frozen_weights
from eke.training.model.load_pretrained import LoadReport
from eke.training.model.loss import (
    LossFunction,
    build_compiled_loss,
    build_loss,
    loss_head,
    loss_sum,
)
from eke.training.model.model_checks import check_copies, check_head, check_packing
from eke.training.model.number_formats import Formats, build_formats, compile_model
from eke.training.model.save_model import build_trainable, set_eos_token_ids, set_id2label
from eke.training.observe.memory_stages import memory_in_use
from eke.training.optimizer.build_optimizer import Multiplier, build_optimizer, build_schedule
from eke.training.optimizer.update import InBackwardUpdate, PlainUpdate, Update

_log = logging.getLogger(__name__)


@dataclass
class TrainingState:
    """Objects of one attempt at a run, restored from its newest complete checkpoint."""

    plan: Plan
    paths: RunPaths
    attempt: int
    stop: StopFlag
    tracker: Tracker
    meter: Meter
    stages: dict[str, int]
    """Bytes of memory in use after each stage."""
    ranks: Ranks = SINGLE_PROCESS
    device: torch.device = field(init=False)
    model: nn.Module = field(init=False)
    """Module to call: wrapped for ranks, and compiled if configured."""
    bare_model: nn.Module = field(init=False)
    """Module with the same weights without wrappers, for checkpoints and inspection."""
    optimizer: torch.optim.Optimizer = field(init=False)
    update: Update = field(init=False)
    formats: Formats = field(init=False)
    loss: LossFunction = field(init=False)
    offload: AbstractContextManager[Any] = field(init=False)
    """Context of each training forward pass that selects where saved activations are kept."""
    cache_release: CacheRelease = field(init=False)
    multiplier: Multiplier = field(init=False)
    data: TrainingData = field(init=False)
    transfer: Transfer = field(init=False)
    callbacks: OwnCallbacks = field(init=False)
    start_step: int = 0
    tokenizer: Any = None
    """Tokenizer of transformers, saved with the weights. None for bytes."""
    parameters: list[nn.Parameter] = field(init=False)
    """Trainable parameters."""
    evaluations: list[metrics.Row] = field(default_factory=list)
    """Evaluations so far, with earlier attempts for early stopping or `train.keep_best`."""
    classes: dict[str, Any] = field(default_factory=dict)
    """Values per class of the last or best evaluation, if this attempt made it."""
    effective: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    eval_s: float = 0.0
    checkpoint_s: float = 0.0
    """Seconds that steps have waited for saving."""
    saving: Saving | None = None
    """Checkpoint that is being written in the background."""
    profiled_peak: int | None = None
    """Peak bytes of the CPU's tensor allocator in the profiled step."""
    longest: int | None = None
    """Step of this attempt with the longest micro-batch, on a CPU. None until it is known."""
    largest: MicroBatchShape | None = None
    """Largest micro-batch of the current step."""
    profiled: MicroBatchShape | None = None
    """Largest micro-batch of the profiled step."""
    before_step: RandomState | None = None
    """Random state before the current step, if the step can be abandoned."""
    peaks: list[int | None] | None = None
    """Peak bytes of each rank's tensor allocator, if there are several ranks."""

    def __post_init__(self) -> None:
        plan, ranks = self.plan, self.ranks
        self.device = device = torch_device(plan)
        self.meter.clock = Clock(device)
        # Joins the processes, so it comes first. `accelerate launch` must not change the precision.
        accelerator = Accelerator(
            cpu=device.type == "cpu", mixed_precision="no", kwargs_handlers=build_handlers(plan)
        )
        parts = parts_of(plan, device, ranks)
        self.bare_model, report = build_checked(plan, device, parts)
        self.formats = build_formats(plan, device, self.bare_model)
        allow_unused_experts(plan, self.bare_model, accelerator)
        shared = share_model(plan, accelerator, self.bare_model, parts)
        self.parameters = [p for p in self.bare_model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(plan, self.bare_model)
        # All ranks must resume from the same checkpoint.
        checkpoint = ranks.tell(newest_complete(self.paths.checkpoints) if ranks.is_main else None)
        self._start(shared, parts, checkpoint)
        if checkpoint is not None:
            _log.info("resuming after step %d (%s)", self.start_step, checkpoint.name)
        self.meter.timed_from = self.start_step + plan.config.train.timing_warmup_steps
        self.offload = build_activation_offload(plan, self.bare_model, self.formats.held)
        self.cache_release = CacheRelease(plan.config.memory.empty_cache_every, device)
        self.multiplier = build_schedule(plan)
        self.data = build_data(plan, left=report.padding == "left")
        self.transfer, self.tokenizer = Transfer(device), load_plan_tokenizer(plan)
        self.callbacks = OwnCallbacks(self)
        if checkpoint is not None:
            self.callbacks.load(checkpoint)
        self._warn_of_start(report)
        self.note_stage("weights")
        self.callbacks.call("on_init_end", self.start_step)

    def _start(self, shared: nn.Module, parts: Parts | None, checkpoint: Path | None) -> None:
        """Load the checkpoint, if any, and compile the model or build its engine."""
        plan, model, ranks = self.plan, self.bare_model, self.ranks
        if plan.compute.copies and not family_of(plan.config).is_known:
            check_copies(model, self.formats.copies)
        if checkpoint is not None:
            with parts or nullcontext():  # DeepSpeed has not sharded its weights yet
                load_model(checkpoint, model, ranks)
        engine: DeepSpeedUpdate | None = None
        scaler: Any = self.formats.scaler
        if plan.deepspeed is None:
            self.model, self.loss = compile_model(plan, shared), build_compiled_loss(plan, model)
            if plan.ranks.is_dp:  # one module per device of this rank
                made = build_data_parallel(plan, self.model, self.loss, self.formats)
                self.model, self.loss = made
            if plan.config.memory.optimizer_in_backward:
                record = plan.config.train.record_grad_norm
                self.update = InBackwardUpdate(self.optimizer, self.parameters, record)
            else:
                kind = ShardedUpdate if parts else PlainUpdate
                self.update = kind(plan, self.model, self.optimizer, scaler, self.parameters)
        else:
            swap = swap_folder(plan, self.paths)
            remove_swap(swap, ranks.rank)  # files of an attempt that was killed
            ranks.gather(None)  # a late rank must not remove the folder of another
            how = self.formats, self.device, swap, parts
            self.model = build_engine(plan, model, self.optimizer, *how)
            self.update = engine = DeepSpeedUpdate(plan, self.model, self.device)
            # The engine has its own autocast and loss scale.
            self.loss, scaler = build_loss(plan, model), engine.scale
            self.formats = Formats(nullcontext, nullcontext, None)
        # Dropout masks differ between ranks. A checkpoint restores its own states.
        accelerate.utils.set_seed((plan.config.seed + ranks.rank) % 2**32)
        if checkpoint is not None:
            rest = self.optimizer, scaler, ranks, plan.config.seed, engine
            self.start_step = load_checkpoint(checkpoint, model, *rest)

    def _warn_of_start(self, report: LoadReport) -> None:
        drawn = (*report.new_weights, *report.resized_weights)
        random = [name for name in drawn if name not in report.unreached]
        adapted = warn_random_frozen_weights(self.bare_model, random)
        adapted += getattr(self.bare_model, "without_adapters", [])
        headed = set_id2label(self.plan, self.bare_model, report)
        set_eos_token_ids(self.plan, self.bare_model)
        for warning in (*report.warnings, *adapted, *headed):
            self.warn(warning)
        rows, done = self.paths.metrics, self.start_step
        missing = metrics.num_missing(rows, done) if self.ranks.is_main else 0
        if missing:
            lost = f"{missing} of the checkpoint's {done} steps"
            self.warn(f"{rows.name} lacks {lost}: curve and timings omit them")

    def warn(self, message: str) -> None:
        """Add a warning once, to the log of this rank and, on rank 0, to the record."""
        if message not in self.warnings:
            self.warnings.append(message)
            _log.warning(message)

    def note_stage(self, stage: str) -> None:
        """Record the bytes of memory in use at this stage."""
        if (used := memory_in_use(self.device)) is not None:
            self.stages[stage] = used


def torch_device(plan: Plan) -> torch.device:
    """Return the torch device of the plan, or raise RuntimeError if torch has no GPU."""
    if plan.device.kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        mine = f"this torch ({torch.__version__})"
        raise RuntimeError(f"the plan is for {plan.device.name}, but {mine} has no GPU")
    return torch.device("cuda", torch.cuda.current_device())


def build_checked(
    plan: Plan, device: torch.device, parts: Parts | None = None
) -> tuple[nn.Module, LoadReport]:
    """Build the model. A model of an unknown family is checked with eight tokens."""
    # ZeRO-3 builds weights on the host and moves them to the device one by one.
    bare, report = build_trainable(
        plan, torch.device("cpu") if plan.ranks.zero_stage == 3 else device, parts
    )
    if not family_of(plan.config).is_known:
        training = bare.training
        bare.eval()
        with parts.computing(bare) if parts else nullcontext():
            if loss_head(bare) is not None:
                check_head(bare, loss_sum)
            if is_packed(plan.config):
                check_packing(bare)
        bare.train(training)
    return bare, report
