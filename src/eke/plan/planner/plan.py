"""The plan: every derived decision of a run with its reason; frozen, as text and on disk."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import cattrs

from eke.common.errors import RunError
from eke.common.files import read_json, write_json
from eke.common.paths import RunPaths, program
from eke.common.text import align, format_bytes, format_count, format_flops
from eke.config.mixing import source_configs
from eke.config.schema import Config, PretrainedModel
from eke.config.schema.codec import make_converter
from eke.data.sources import BYTE_TOKENS, Vocabulary
from eke.hardware import Device
from eke.models.checkpoints.architecture import router_loss
from eke.models.families import family_of
from eke.models.sizes import ModelSize, WeightFormats
from eke.plan.identity import meaningful


@dataclass(frozen=True)
class Decision:
    """One thing the user left open, what was chosen, and why."""

    key: str
    """Key path it answers: `batch.accumulation`."""
    value: str
    """What was chosen, as the user would type it."""
    reason: str
    """Why, in one clause with its numbers."""


class RecipeDecision(Decision):
    """A decision of an adaptive recipe: its key is one that the user could have set."""


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
    """Number formats (torch dtype names) and implementations; `precision` is not read later."""

    autocast: str | None
    """That of autocast, or of `copies` in its place; None computes in the weights' format."""
    loss_scaling: bool
    """Scale the loss so that float16 gradients do not underflow."""
    tf32: bool
    """TF32 for float32 matrix multiplications."""
    optimizer_implementation: str
    """`forloop`, `foreach` or `fused`; empty for an optimizer that has only one."""
    pin_memory: bool
    """Page-locked host memory for batches."""
    weights: str = "float32"
    """Of trained weights and gradients; adapters are float32."""
    frozen: str = "float32"
    """Of frozen weights; that of `weights` where none are."""
    master: bool = False
    """The optimizer steps on float32 copies of narrower weights."""
    float8: str = "off"
    """Scaling of float8 products in linear layers: `off`, `tensorwise`, `rowwise`."""
    eval_autocast: str | None = None
    """As `autocast`, in evaluation."""
    copies: str = ""
    """Of the copies of float32 weights that a step computes with; "" without."""
    gathered: str = ""
    """That FSDP2 sends float32 matrices in; "" where each weight has its own."""

    @property
    def formats(self) -> WeightFormats:
        """Formats of the training state."""
        return WeightFormats(self.weights, self.master, self.frozen, self.copies, self.gathered)

    @property
    def matmul(self) -> str:
        """Torch dtype name of the operands of matrix multiplications outside of float8 layers."""
        return self.autocast or self.weights


@dataclass(frozen=True)
class DataPlan:
    """What the plan knows of its data."""

    train: int
    """Training samples in one epoch."""
    evaluation: int
    """Samples of one evaluation."""
    fingerprint: str
    """Hash of the content."""
    vocabulary: Vocabulary = BYTE_TOKENS
    store: str = ""
    """Key of the prepared tokens; empty where nothing is prepared."""
    warnings: tuple[str, ...] = ()
    name: str = ""
    """Of a source of a mix, as metrics have it."""
    share: float = 1.0
    """Of a source of a mix: the expected fraction of all samples drawn."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Of a source of a mix: those of the plan's inputs that it adds."""
    sources: "tuple[DataPlan, ...]" = ()
    """Of a mix, in the order of `data.sources`."""


@dataclass(frozen=True)
class Plan:
    """One run, decided. The worker reads nothing else."""

    run_id: str
    """16 hex digits: the identity of the resolved configuration."""
    name: str
    """Short form of the overrides: the name shown in W&B and reports."""
    config: Config
    """The configuration; what it leaves open is answered by the fields below."""
    choices: dict[str, str]
    """Option chosen in each group, recipe and experiment included."""
    overrides: tuple[str, ...]
    """The overrides of the command line."""
    device: Device
    batch: BatchPlan
    steps: StepPlan
    compute: ComputePlan
    size: ModelSize
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]
    """Settings without effect and the like, shown once."""
    data_warnings: tuple[str, ...]
    """Those of them that the data gives rise to."""
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
    sources: tuple[DataPlan, ...] = ()
    """Of a mix, in the order of `data.sources`; other data has none."""
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
        given = [text for text in self.overrides if not text.startswith("launcher.")]
        return [*program().split(), *own, *cell, *given]

    @property
    def processes_per_node(self) -> int:
        """Processes on each machine."""
        return self.batch.world_size // self.config.distributed.num_nodes


def plans_of_sources(plan: Plan) -> list[Plan]:
    """The plan with each source of a mix as its data; none for other data."""
    found = []
    for each, config in zip(plan.sources, source_configs(plan.config), strict=True):
        steps = replace(plan.steps, num_train_samples=each.train, num_eval_samples=each.evaluation)
        one = replace(plan, config=config, steps=steps, sources=(), inputs=each.inputs)
        one = replace(one, store=each.store, vocabulary=each.vocabulary)
        found.append(replace(one, data_fingerprint=each.fingerprint))
    return found


def source_sizes(plan: Plan) -> dict[str, int | None]:
    """Samples in an epoch of each source of a mix, by name; None of a stream that has no number."""
    return {
        source.name: config.data.num_samples if config.data.is_stream else source.train
        for source, config in zip(plan.sources, source_configs(plan.config), strict=True)
    }


def plan_to_plain(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values."""
    return dict(make_converter().unstructure(plan))


def cut_of(plan: Plan) -> dict[str, Any]:
    """How a plan cuts the samples of a step: its groups `distributed` and `batch`."""
    plain = meaningful(make_converter().unstructure(plan.config))
    return {group: plain[group] for group in ("distributed", "batch")}


def remarks_on_cuts(plan: Plan) -> Iterator[str]:
    """Warnings of a run that goes on with another `cut_of` its plan, if that changes training."""
    config = plan.config
    dropout = config.model.dropout
    if dropout is None:
        dropout = family_of(config).probable_dropout
    if dropout or getattr(config.peft, "dropout", 0.0):
        yield "other ranks or micro-batches drew other random numbers for dropout from some step on"
    if router_loss(config) is not None:
        yield "the router loss is a mean over each micro-batch, and their size changed at some step"


def write_plan(paths: RunPaths, plan: Plan) -> None:
    """Freeze the plan into its run folder."""
    write_json(paths.plan, plan_to_plain(plan))


def read_plan(paths: RunPaths) -> Plan:
    """The plan of a run folder, or a RunError: there is none, or it cannot be read."""
    try:
        return make_converter().structure(read_json(paths.plan), Plan)
    except (OSError, ValueError, TypeError, AttributeError, cattrs.BaseValidationError) as error:
        raise RunError(f"{paths.plan}: not a readable plan ({error})") from error


def render_plan(plan: Plan) -> str:
    """Every decision with its reason, then the size of the job, then warnings."""
    rows = [(d.key, d.value, d.reason) for d in plan.decisions]
    rows += _size_rows(plan)
    chosen = "  ".join(
        f"{group}={option}"
        for group, option in sorted(plan.choices.items())
        if option not in ("none", "loop") and group not in ("hardware", "sweep", "distributed")
    )
    options = textwrap.wrap(chosen, 98, initial_indent="  ", subsequent_indent="  ")
    lines = [f"  {line}" for line in align(rows, right=[1])]
    warnings = [f"  warning: {warning}" for warning in plan.warnings]
    return "\n".join([f"plan {plan.run_id}", *options, "", *lines, *warnings])


def _which_model(plan: Plan) -> str:
    """What was chosen, the checkpoint behind it, and how much of it a token sees."""
    words = f"model={plan.config.model.option}"
    if isinstance(plan.config.model, PretrainedModel):
        words += f" {plan.config.model.name_or_path}"
    if plan.size.num_active_parameters != plan.size.num_parameters:
        words += f", {format_count(plan.size.num_active_parameters)} active per token"
    return words


def _size_rows(plan: Plan) -> list[tuple[str, str, str]]:
    size, steps = plan.size, plan.steps
    flops = size.flops_per_sample
    step = "unknown" if flops is None else format_flops(flops * plan.batch.samples_per_step)
    memory, free = plan.device.memory_bytes, ""
    if not plan.device.present:
        free = "declared, not present: for planning only"
    elif plan.device.available_bytes is not None:
        free = f"{format_bytes(plan.device.available_bytes)} of it free now"
    trained, peft = size.num_trained_parameters, plan.config.peft.option
    by = "model.freeze" if plan.config.model.freeze else f"peft={peft}"
    share = f"{by}; the built model tells"
    if trained is not None:
        share = f"{trained / size.num_parameters:.2%} as many as the model has, by {by}"
    count = "unknown" if trained is None else format_count(trained)
    # The last step of an epoch has what is left of it.
    epochs, more = divmod(steps.total, steps.per_epoch)
    once = steps.num_train_samples
    num_samples = epochs * once + min(more * plan.batch.samples_per_step, once)
    length = f"{num_samples / once:.2f} epochs of {once} samples"
    if plan.config.data.is_stream and plan.config.data.num_samples is None:
        length = "of a stream, begun again at its end"
    return [
        ("parameters", format_count(size.num_parameters), _which_model(plan)),
        *([("trained parameters", count, share)] if by != "peft=none" else []),
        ("model FLOPs per step", step, size.flops_formula),
        ("samples in all", format_count(num_samples), length),
        *(
            (f"source {s.name}", f"{s.share:.1%}", _times(s, num_samples, source_sizes(plan)))
            for s in plan.sources
        ),
        ("device memory", format_bytes(memory) if memory else "unknown", free),
    ]


def _times(source: DataPlan, num_samples: int, sizes: dict[str, int | None]) -> str:
    size, drawn = sizes[source.name], num_samples * source.share
    times = f"{drawn / size:.2f} epochs of {size} samples" if size else f"{drawn:.0f} of a stream"
    return f"{times}; {source.evaluation} to evaluate"
