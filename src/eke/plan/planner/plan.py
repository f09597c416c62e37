"""Plan of a run: every derived decision with its reason, as text and on disk."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import cattrs

from eke.common.errors import RunError
from eke.common.files import read_json, write_json
from eke.common.paths import RunPaths, program
from eke.common.screen import fields, width, wrap
from eke.common.text import align, format_bytes, format_count, format_flops
from eke.config.mixing import source_configs
from eke.config.schema import Config, CustomModel, Distributed, PretrainedModel, Task
from eke.config.schema.codec import make_converter
from eke.data.sources import BYTE_TOKENS, Vocabulary
from eke.hardware import Device
from eke.models.checkpoints.architecture import router_loss
from eke.models.families import family_of
from eke.models.sizes import ModelSize, WeightFormats
from eke.plan.identity import meaningful
from eke.plan.own_code import Code, freeze_code


@dataclass(frozen=True)
class Decision:
    """Value chosen for a setting that the configuration leaves open, and the reason."""

    key: str
    """Key path of the setting: `batch.accumulation`."""
    value: str
    """Chosen value as in an override."""
    reason: str


class ShownDecision(Decision):
    """Decision that is always shown: what is ignored, or chosen in place of the user."""


class RecipeDecision(ShownDecision):
    """Decision of an adaptive recipe about a key of the configuration."""


@dataclass(frozen=True)
class BatchPlan:
    """Division of an optimizer step into forward passes."""

    per_device: int
    """Samples per device and forward pass."""
    accumulation: int
    """Forward passes per device and optimizer step."""
    world_size: int
    eval_per_device: int
    """Samples per device and forward pass in evaluation."""
    devices: int = 1
    """Devices per process: several with DataParallel."""

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step over all devices."""
        return self.per_device * self.accumulation * self.world_size * self.devices


@dataclass(frozen=True)
class StepPlan:
    """Length of training."""

    total: int
    per_epoch: int
    """Optimizer steps per epoch. The last step may have fewer samples."""
    warmup: int
    """Steps of linear learning-rate warm-up."""
    num_train_samples: int
    """Training samples in one epoch."""
    num_eval_samples: int
    """Samples of one evaluation."""


@dataclass(frozen=True, kw_only=True)
class ComputePlan(WeightFormats):
    """Number formats (torch dtype names) and implementations, resolved from `precision`."""

    autocast: str | None
    """Format of autocast or of `copies`, None: computation in the weights' format."""
    loss_scaling: bool
    """True if the loss is scaled to prevent underflow of float16 gradients."""
    tf32: bool
    optimizer_implementation: str
    """`forloop`, `foreach` or `fused`, empty for optimizers with one implementation."""
    pin_memory: bool
    """True if batches are in page-locked host memory."""
    float8: str = "off"
    """Scaling of float8 products in linear layers: `off`, `tensorwise`, `rowwise`."""
    eval_autocast: str | None = None

    @property
    def matmul(self) -> str:
        """Torch dtype name of the operands of matrix multiplications outside of float8 layers."""
        return self.autocast or self.weights


@dataclass(frozen=True)
class DataPlan:
    """Number of samples and identity of the data."""

    train: int
    """Training samples in one epoch."""
    evaluation: int
    """Samples of one evaluation."""
    fingerprint: str
    vocabulary: Vocabulary = BYTE_TOKENS
    store: str = ""
    """Key of the prepared tokens, empty without prepared tokens."""
    warnings: tuple[str, ...] = ()
    name: str = ""
    """Name of a source of a mix, as in metrics."""
    share: float = 1.0
    """Expected fraction of all drawn samples, for a source of a mix."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Inputs that a source of a mix adds to the plan."""
    sources: "tuple[DataPlan, ...]" = ()
    """Sources of a mix in the order of `data.sources`."""


@dataclass(frozen=True)
class Plan:
    """Plan of one run, the only input of the worker."""

    run_id: str
    """Identity of the resolved configuration, 16 hex digits."""
    name: str
    """Overrides, shown as name in W&B and reports."""
    config: Config
    """Configuration. Open settings are resolved by the fields below."""
    choices: dict[str, str]
    """Option chosen in each group, including recipe and experiment."""
    overrides: tuple[str, ...]
    device: Device
    batch: BatchPlan
    steps: StepPlan
    compute: ComputePlan
    size: ModelSize
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]
    """Warnings, for example about settings without effect."""
    data_warnings: tuple[str, ...]
    """Part of `warnings` about the data."""
    machine: dict[str, str]
    """Fingerprint of device and software for reuse of the record."""
    data_fingerprint: str
    inputs: dict[str, str] = field(default_factory=dict)
    """Key path of the user's files that the worker reads -> hash of the content."""
    vocabulary: Vocabulary = BYTE_TOKENS
    """Special ids of the tokens, for synthetic data the byte tokens'."""
    store: str = ""
    """Key of the prepared tokens in the cache folder, empty without prepared tokens."""
    sources: tuple[DataPlan, ...] = ()
    """Sources of a mix in the order of `data.sources`, empty for other data."""
    deepspeed: dict[str, Any] | None = None
    """DeepSpeed's configuration including the user's keys, None without DeepSpeed."""
    probe: bool = False
    """True if this is a memory trial of the run: two steps of the longest samples, without data."""
    code: Code | None = None
    """Own code that the configuration names by import path, None without own code."""
    config_dir: str = ""
    """Absolute path of the folder with the user's options, empty without one."""

    @property
    def command(self) -> list[str]:
        """Command that starts only this run."""
        own = ["--config-dir", self.config_dir] if self.config_dir else []
        cell = ["--cell"] if self.choices.get("sweep", "none") != "none" else []
        given = [text for text in self.overrides if not text.startswith("launcher.")]
        return [*program().split(), *own, *cell, *given]

    @property
    def ranks(self) -> Distributed:
        """Facts about the processes of the run."""
        return self.config.ranks

    @property
    def targets(self) -> Task:
        """Facts about the targets of the task."""
        return self.config.targets

    @property
    def processes_per_node(self) -> int:
        """Number of processes per node."""
        return self.batch.world_size // self.ranks.num_nodes


def plans_of_sources(plan: Plan) -> list[Plan]:
    """Return a plan for each source of a mix, [] for other data."""
    found = []
    for each, config in zip(plan.sources, source_configs(plan.config), strict=True):
        steps = replace(plan.steps, num_train_samples=each.train, num_eval_samples=each.evaluation)
        one = replace(plan, config=config, steps=steps, sources=(), inputs=each.inputs)
        one = replace(one, store=each.store, vocabulary=each.vocabulary)
        found.append(replace(one, data_fingerprint=each.fingerprint))
    return found


def source_sizes(plan: Plan) -> dict[str, int | None]:
    """Return the samples per epoch of each source of a mix by name, None for unlimited streams."""
    return {
        source.name: config.data.num_samples if config.data.is_stream else source.train
        for source, config in zip(plan.sources, source_configs(plan.config), strict=True)
    }


def plan_to_plain(plan: Plan) -> dict[str, Any]:
    """Convert the plan to JSON values."""
    return dict(make_converter().unstructure(plan))


def cut_of(plan: Plan) -> dict[str, Any]:
    """Return the groups `distributed` and `batch`, which divide the samples of a step."""
    plain = meaningful(make_converter().unstructure(plan.config))
    return {group: plain[group] for group in ("distributed", "batch")}


def remarks_on_cuts(plan: Plan) -> Iterator[str]:
    """Yield warnings for a run that resumes with another `cut_of` its plan."""
    config = plan.config
    dropout = config.model.dropout
    if dropout is None:
        dropout = family_of(config).probable_dropout
    if dropout or getattr(config.peft, "dropout", 0.0):
        yield "dropout uses other random numbers since ranks or micro-batches changed"
    if router_loss(config) is not None:
        yield "the router loss is a mean over a micro-batch, and the micro-batch size changed"


def write_plan(paths: RunPaths, plan: Plan) -> None:
    """Write the plan and its own code into its run folder."""
    if plan.code is not None:
        freeze_code(plan.code, paths.folder)
    write_json(paths.plan, plan_to_plain(plan))


def read_plan(paths: RunPaths) -> Plan:
    """Read the plan of a run folder; RunError if it is missing or unreadable."""
    try:
        return make_converter().structure(read_json(paths.plan), Plan)
    except (OSError, ValueError, TypeError, AttributeError, cattrs.BaseValidationError) as error:
        raise RunError(f"{paths.plan}: not a readable plan ({error})") from error


_MIN_REASON = 30
"""Fewest columns for reasons on the line of their values: a choice."""


def render_plan(plan: Plan) -> str:
    """Render every decision with its reason, and the size of the run, in the terminal's width."""
    rows = [(d.key, d.value, d.reason) for d in plan.decisions]
    rows += _size_rows(plan)
    chosen = "  ".join(
        f"{group}={option}"
        for group, option in sorted(plan.choices.items())
        if option not in ("none", "loop") and group not in ("hardware", "sweep", "distributed")
    )
    values = align([row[:2] for row in rows], right=[1])
    if max(map(len, values)) + 4 + _MIN_REASON <= width():
        lines = fields(list(zip(values, (row[2] for row in rows), strict=True)), width(), 2)
    else:
        below = (each for key, value, why in rows for each in ((key, value), ("", why)))
        lines = fields([pair for pair in below if any(pair)], width(), 2)
    return "\n".join([f"plan {plan.run_id}", *wrap(chosen, width(), "  "), "", *lines])


def describe_model(plan: Plan) -> str:
    """Return the model's option, name and active parameters as text."""
    words = f"model={plan.config.model.option}"
    if isinstance(plan.config.model, PretrainedModel):
        words += f" {plan.config.model.name_or_path}"
    if isinstance(plan.config.model, CustomModel):
        words += f" {plan.config.model.target}"
    if plan.size.num_active_parameters != plan.size.num_parameters:
        words += f", {format_count(plan.size.num_active_parameters)} active per token"
    return words


def _size_rows(plan: Plan) -> list[tuple[str, str, str]]:
    size = plan.size
    flops = size.flops_per_sample
    step = "unknown" if flops is None else format_flops(flops * plan.batch.samples_per_step)
    memory, free = plan.device.memory_bytes, ""
    if not plan.device.present:
        free = "declared, not present: for planning only"
    elif plan.device.available_bytes is not None:
        free = f"{format_bytes(plan.device.available_bytes)} free now"
    trained, peft = size.num_trained_parameters, plan.config.peft.option
    by = "model.freeze" if plan.config.model.freeze else f"peft={peft}"
    share = f"{by}, known after building the model"
    if trained is not None:
        share = f"{trained / size.num_parameters:.2%} of the model's parameter count, by {by}"
    count = "unknown" if trained is None else format_count(trained)
    num_samples, length = length_of_run(plan)
    return [
        ("parameters", format_count(size.num_parameters), describe_model(plan)),
        *([("trained parameters", count, share)] if by != "peft=none" else []),
        ("model FLOPs per step", step, size.flops_formula),
        ("total samples", format_count(num_samples), length),
        *(
            (f"source {s.name}", f"{s.share:.1%}", _times(s, num_samples, source_sizes(plan)))
            for s in plan.sources
        ),
        ("device memory", format_bytes(memory) if memory else "unknown", free),
    ]


def length_of_run(plan: Plan) -> tuple[int, str]:
    """Return the samples of all steps, and the epochs as text."""
    steps, once = plan.steps, plan.steps.num_train_samples
    # The last step of an epoch has the remaining samples.
    epochs, more = divmod(steps.total, steps.per_epoch)
    num_samples = epochs * once + min(more * plan.batch.samples_per_step, once)
    if plan.config.data.is_stream and plan.config.data.num_samples is None:
        return num_samples, "of a stream, repeated at its end"
    return num_samples, f"{num_samples / once:.2f} epochs of {once} samples"


def _times(source: DataPlan, num_samples: int, sizes: dict[str, int | None]) -> str:
    size, drawn = sizes[source.name], num_samples * source.share
    times = f"{drawn / size:.2f} epochs of {size} samples" if size else f"{drawn:.0f} of a stream"
    return f"{times}; {source.evaluation} for evaluation"
