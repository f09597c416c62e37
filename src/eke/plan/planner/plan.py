"""The plan: every derived decision of a run with its reason; frozen, printable, for the worker."""

from dataclasses import dataclass, field
from typing import Any

from eke.common.paths import program
from eke.config.schema import Config
from eke.data.sources import BYTE_TOKENS, Vocabulary
from eke.hardware import Device
from eke.models.sizes import ModelSize


@dataclass(frozen=True)
class Decision:
    """One thing the user left open, what was chosen, and why."""

    key: str
    """Key path it answers: `batch.accumulation`."""
    value: str
    """What was chosen, as the user would type it."""
    reason: str
    """Why, in one clause with its numbers."""


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step is cut into forward passes."""

    per_device: int
    """Samples per device and forward pass."""
    accumulation: int
    """Forward passes per device and optimizer step."""
    world_size: int
    """Processes."""
    eval_per_device: int
    """Samples per device and forward pass in evaluation."""
    devices: int = 1
    """Devices that one process feeds: several with DataParallel."""

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step over all devices."""
        return self.per_device * self.accumulation * self.world_size * self.devices


@dataclass(frozen=True)
class StepPlan:
    """How long training lasts."""

    total: int
    """Optimizer steps."""
    per_epoch: int
    """Optimizer steps per pass over the training samples; the last one may hold fewer samples."""
    warmup: int
    """Steps of linear learning-rate warm-up."""
    num_train_samples: int
    """Training samples in one epoch."""
    num_eval_samples: int
    """Samples of one evaluation."""


@dataclass(frozen=True)
class ComputePlan:
    """Formats and implementations."""

    autocast: str | None
    """torch dtype name of autocast (`bfloat16`, `float16`); None computes in float32."""
    loss_scaling: bool
    """Scale the loss so that float16 gradients do not underflow."""
    tf32: bool
    """TF32 for float32 matrix multiplications."""
    optimizer_implementation: str
    """`forloop`, `foreach` or `fused`; empty for an optimizer that has only one."""
    pin_memory: bool
    """Page-locked host memory for batches."""
    weights: str = "float32"
    """torch dtype name of weights and gradients."""
    master: bool = False
    """The optimizer steps on float32 copies of narrower weights."""
    float8: str = "off"
    """Scaling of float8 products in linear layers: `off`, `tensorwise`, `rowwise`."""
    eval_autocast: str | None = None
    """As `autocast`, in evaluation."""

    @property
    def matmul(self) -> str:
        """Torch dtype name of the operands of matrix multiplications outside of float8 layers."""
        return self.autocast or self.weights


@dataclass(frozen=True)
class Plan:
    """One run, decided. The worker reads nothing else."""

    run_id: str
    """16 hex digits: the identity of the resolved configuration."""
    name: str
    """What was typed, in short: the name shown in W&B and reports."""
    config: Config
    """The configuration; what it leaves open is answered by the fields below."""
    choices: dict[str, str]
    """Option chosen in each group, recipe and experiment included."""
    overrides: tuple[str, ...]
    """What was typed."""
    device: Device
    batch: BatchPlan
    steps: StepPlan
    compute: ComputePlan
    size: ModelSize
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]
    data_warnings: tuple[str, ...]
    """Those of them that the data gives rise to."""
    """Settings without effect and the like, shown once."""
    machine: dict[str, str]
    """Fingerprint of device and software, for reuse of the record."""
    data_fingerprint: str
    """Hash of the data's content."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Key path of what the worker reads from the user's files -> hash of its content."""
    vocabulary: Vocabulary = BYTE_TOKENS
    """Special ids of the tokens; eke's byte tokens for synthetic data."""
    store: str = ""
    """Key of the prepared tokens in the cache folder; empty where there are none."""
    deepspeed: dict[str, Any] | None = None
    """DeepSpeed's configuration, the user's keys included; None where DeepSpeed has no part."""
    probe: bool = False
    """Not the run but a trial of its memory: two steps of the longest samples, from no data."""
    config_dir: str = ""
    """Absolute path of the folder with the user's own options; empty where there is none."""

    @property
    def command(self) -> list[str]:
        """What starts this run alone, to be pasted into a shell."""
        own = ["--config-dir", self.config_dir] if self.config_dir else []
        cell = ["--cell"] if self.choices.get("sweep", "none") != "none" else []
        typed = [text for text in self.overrides if not text.startswith("launcher.")]
        return [*program().split(), *own, *cell, *typed]

    @property
    def processes_per_node(self) -> int:
        """Processes on each machine."""
        return self.batch.world_size // self.config.distributed.num_nodes
