"""Values of a memory forecast in bytes of one device, and its shapes, without torch."""

from dataclasses import dataclass, field
from enum import Enum

from eke.config.schema import Packing
from eke.models.families import Shape, family_of
from eke.models.sizes import BFLOAT16_BYTES, is_ragged, predicted_frac
from eke.plan.planner import MicroBatchShape, Plan, shares_heads, simulated_micro_batches

MEMORY_PHASES = {
    "load": "while the model is loaded",
    "resume": "while a checkpoint is read",
    "forward": "at the end of the forward pass",
    "backward": "in the backward pass",
    "optimizer": "while the optimizer steps",
    "evaluation": "in evaluation",
    "save": "while a checkpoint is saved",
}
"""Phases of a run in which memory may be highest, with their text."""


class Method(Enum):
    """How a forecast was made, the most exact method first."""

    trace = "trace"
    """The run's own builders: two steps on tensors without data, replayed through an allocator."""
    upper_bound = "upper_bound"
    """A trace that rarely needs less: the eager model instead of the compiled one."""
    closed_form = "closed_form"
    """Formulas over shapes, exact for memory kept between steps, wide for activations."""


class Verdict(Enum):
    """True if a plan fits on its device."""

    fits = "fits"
    tight = "tight"
    """The expected peak fits, the high peak does not."""
    does_not_fit = "does not fit"
    """The expected peak does not fit."""
    unknown = "unknown"
    """The device's memory is unknown, or own code could not be traced."""


@dataclass(frozen=True)
class Range:
    """Bytes as low, expected and high value."""

    low: int
    expected: int
    high: int

    def __post_init__(self) -> None:
        assert 0 <= self.low <= self.expected <= self.high, self

    def __add__(self, other: "Range") -> "Range":
        return Range(self.low + other.low, self.expected + other.expected, self.high + other.high)


@dataclass(frozen=True)
class Traced:
    """Result of a trace: peaks in bytes on the first process's device."""

    allocated: dict[str, int]
    """Highest sum of tensors in each phase."""
    reserved: dict[str, int]
    """Highest sum of the allocator's segments by the end of each phase, on a CPU `allocated`."""
    components: dict[str, int]
    """Live memory at the highest sum of tensors: weights, gradients, optimizer, ..."""
    method: Method = Method.trace
    notes: tuple[str, ...] = ()
    """Substitutions for the plan's operations, one clause each."""
    is_exact: bool = True
    """True if all traced operations are the plan's own."""
    beside: dict[str, int] = field(default_factory=dict)
    """Highest sum in each phase without weights, gradients and optimizer states."""


@dataclass(frozen=True)
class Forecast:
    """Predicted memory of one plan on one device."""

    method: Method
    basis: str
    """Measurement comparable with `peak`, such as memory reserved by PyTorch and the context."""
    peak: Range
    """Memory that the device must provide."""
    allocated: Range
    """Highest sum of tensors, comparable with a record's `peak_allocated_bytes`."""
    phases: dict[str, int]
    """Expected highest sum of tensors in each phase."""
    components: dict[str, int]
    """Expected bytes of each component at the peak. Their sum is `peak.expected`."""
    capacity: int | None
    """Bytes of the device available to this run. None if unknown."""
    verdict: Verdict
    doubts: tuple[str, ...] = ()
    """Reasons for the width of the range: keys of `UNCERTAINTY_REASONS`."""
    substitutions: tuple[str, ...] = ()
    """`Traced.notes` of the trace used by the forecast."""
    not_traced: str = ""
    """Why a requested trace failed."""

    @property
    def notes(self) -> tuple[str, ...]:
        """All reasons for the width of the range, one clause each."""
        missing = (f"not traced: {self.not_traced}",) if self.not_traced else ()
        return (
            *self.substitutions,
            *(UNCERTAINTY_REASONS[doubt] for doubt in self.doubts),
            *missing,
        )


ZERO_RANGE = Range(0, 0, 0)


def exact_range(number: int) -> Range:
    """Return the range of a size known to the byte."""
    return Range(number, number, number)


def range_around(low: int, expected: int, high: int) -> Range:
    """Return a range around the expected value. Ends on its wrong side are moved to it."""
    expected = max(0, expected)
    return Range(max(0, min(low, expected)), expected, max(expected, high))


def shape_of(plan: Plan, micro: MicroBatchShape | None = None) -> Shape:
    """Return the shape of a forward pass, by default of a training's longest micro-batch."""
    config, model, data = plan.config, plan.config.model, plan.config.data
    heads = model.num_attention_heads or 1
    typed = getattr(model, "head_dim", None) if model.num_attention_heads else None
    width = typed or model.hidden_size // heads
    grouped = getattr(model, "num_key_value_heads", None) or heads
    family = family_of(config)
    decoders = getattr(model, "num_decoder_layers", None) or model.num_hidden_layers
    micro = micro or simulated_micro_batches(plan).expected
    formats = plan.compute
    # After trained weights, the residual stream is as wide as these weights.
    trained = model.freeze and not formats.copies
    weights = formats.weight_bytes if trained else formats.stream_bytes
    return Shape(
        architecture=family,
        layers=model.num_hidden_layers,
        decoder_layers=decoders if family.is_encoder_decoder else 0,
        rows=micro.rows,
        source=micro.source,
        target=micro.target,
        hidden=model.hidden_size,
        inner=model.intermediate_size or 4 * model.hidden_size,
        heads=heads,
        queries=heads * width,
        keys=grouped * width,
        repeated=(grouped if shares_heads(plan) else heads) * width,
        vocabulary=model.vocab_size,
        predicted=predicted_frac(config, micro.target),
        experts=getattr(model, "num_local_experts", 0) if family.is_moe else 0,
        chosen=getattr(model, "num_experts_per_tok", 0) if family.is_moe else 0,
        gated=family.is_gated or bool(getattr(model, "gated", False)),
        dropout=family.probable_dropout if model.dropout is None else model.dropout,
        weights=weights,
        compute=BFLOAT16_BYTES if plan.compute.autocast else weights,
        on_cpu=plan.device.kind == "cpu",
        masked=is_ragged(config)
        or data.packing is not Packing.off
        or data.seq_len % (data.pad_to_multiple_of or 1) != 0,
    )


UNCERTAINTY_REASONS = {
    "architecture": "no formulas for this architecture: estimated as a Llama of its size",
    "own_code": "at least: activations of own code are known only by a trace",
    "compiler": "torch.compile selects the activations kept for the backward pass",
    "fused_kernels": "fused kernels keep less than the model's own operations",
    "lengths": "samples differ in length: the longest micro-batch of a training is counted",
    "adapters": "adapters change the tensors kept by each layer",
    "frozen": "frozen layers are counted as trained ones, which keep more",
    "experts": "experts process as many tokens as the router sends",
    "unpacking": "4-bit weights are unpacked layer by layer",
    "ds_config": "a user's ds_config.json may move or share anything",
    "gathering": "the library decides when sharded weights are gathered, and how many",
    "data_parallel": "the first device gathers the outputs of the others",
    "float8": "float8 operands are kept in addition to 16-bit ones",
    "dropout": "the checkpoint's own dropout is unknown: 0.1 is counted",
    "driver": "the driver's context and the allocator's reserve are known as ranges",
}
"""Reasons for a forecast's wide range, by doubt."""

UNTRACED = ("lengths", "gathering", "driver")
"""Doubts that also apply to a trace."""


def uncertainty_reasons(plan: Plan) -> tuple[str, ...]:
    """Return the doubts that apply, none if the formulas model the techniques well."""
    shape, config, ranks = shape_of(plan), plan.config, plan.ranks
    applies: dict[str, object] = {
        "own_code": plan.code is not None,
        "architecture": not shape.architecture.is_known and shape.architecture.name != "custom",
        "compiler": config.compile.option not in ("none", "eager"),
        "fused_kernels": config.kernels.is_liger,
        "lengths": simulated_micro_batches(plan).differ,
        "adapters": config.peft.is_on,
        "frozen": config.model.freeze,
        "experts": shape.experts,
        "unpacking": config.peft.option == "qlora",
        "ds_config": ranks.deepspeed_config,
        "gathering": ranks.shards_states,
        "data_parallel": ranks.is_dp,
        "float8": plan.compute.float8 != "off",
        "dropout": config.model.dropout is None and shape.dropout,
        "driver": not shape.on_cpu,
    }
    return tuple(doubt for doubt in UNCERTAINTY_REASONS if applies[doubt])
