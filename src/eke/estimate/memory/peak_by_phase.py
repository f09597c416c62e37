"""Moments of a run at which memory may be highest: live bytes by component."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from eke.common.text import MIB
from eke.config.schema import PretrainedModel
from eke.estimate.memory import sharding
from eke.estimate.memory.activations import Activations, optimizer_temporaries, singular_vectors
from eke.estimate.memory.components import (
    ZERO_RANGE,
    Range,
    exact_range,
    range_around,
    shape_of,
)
from eke.models.families import FLOAT32_BYTES, Role, family_of
from eke.models.sizes import shared_state_bytes, training_structure
from eke.plan.planner import MicroBatchShape, Plan, evaluated, simulated_micro_batches

_Parts = dict[str, Range]
"""Bytes by component."""

COMPONENTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "master": "float32 copies of weights",
    "activations": "activations",
    "recomputed": "recomputed activations",
    "logits": "logits and loss",
    "autocast": "16-bit copies of weights",
    "temporaries": "temporaries",
    "buffers": "buffers of sharing",
    "workspace": "cuBLAS workspace",
    "reserve": "allocator's reserve",
    "context": "driver's context",
    "batch": "batch",
    "saving": "what is read or saved",
    "others": "all else",
}
"""Label by component, in the order of display."""

_SLACK_HIGH = 1.12
"""Highest activations relative to their formula. benchmarks/forecast_bounds.py finds 7 % more."""

_SMALL_BYTES = MIB // 4
"""Small buffers (rotary tables, masks, counters) that are not modelled."""

COMPILED_SHARE, COMPILED_AUTOCAST_SHARE = 0.76, 0.62
"""Share of activations kept by torch.compile, which recomputes cheap operations: three quarters or
more by torchtitan's notes; 0.76 with LoRA, 0.62 without, in bf16 on an H100 (notes/lab/gpu.md)."""


@dataclass(frozen=True)
class MemoryPoint:
    """Live memory at one moment."""

    phase: str
    parts: _Parts
    name: str = ""
    """Name of the moment within the phase."""

    @property
    def total(self) -> Range:
        """Bytes of all components."""
        return sum(self.parts.values(), ZERO_RANGE)

    @property
    def tensors(self) -> Range:
        """Bytes of all components except the allocator's reserve."""
        return sum((part for name, part in self.parts.items() if name != "reserve"), ZERO_RANGE)


def _range_from_zero(expected: int, low: int = 0, high: int | None = None) -> Range:
    """Return a range from 0 to slightly above the expected value, or with given ends."""
    return range_around(low, expected, int(expected * _SLACK_HIGH) if high is None else high)


def moments(plan: Plan) -> list[MemoryPoint]:
    """Return every moment that may be the highest, in the order of a run."""
    made = simulated_micro_batches(plan)
    found = memory_points(plan, made.expected)
    if not made.differ:
        return found
    # The ends are from the shortest and the longest possible micro-batch.
    shortest, longest = (memory_points(plan, micro) for micro in (made.shortest, made.longest))
    return [
        replace(each, parts={
            name: range_around(low.parts[name].low, part.expected, high.parts[name].high)
            for name, part in each.parts.items()
        })
        for each, low, high in zip(found, shortest, longest, strict=True)
    ]  # fmt: skip


def memory_points(plan: Plan, micro: MicroBatchShape) -> list[MemoryPoint]:
    """Return the moments if every micro-batch is like this one, in the order of a run."""
    at = _Moments(plan, micro)
    return [
        MemoryPoint("load", {"weights": exact_range(at.loading)}),
        *at.of_checkpoints(),
        at.forward(),
        at.loss(),
        at.last_layer(),
        at.first_layer(),
        at.embedding(),
        *at.of_sharing(),
        at.optimizer(),
        at.evaluation(),
    ]


class _Moments:
    """Formulas of one plan, each evaluated once."""

    def __init__(self, plan: Plan, micro: MicroBatchShape) -> None:
        self.plan, self.config = plan, plan.config
        on_host = plan.device.kind == "cpu"
        self.state = shared_state_bytes(self.config, plan.size, on_host, plan.compute)
        self.shape = shape_of(plan, micro)
        self.parts = training_structure(self.config).weights
        self.acts = Activations(plan, self.shape, self.parts)
        inside = (prod(w.shape) for w in self.parts if w.role in (Role.hidden, Role.vector))
        self.layer = -(-sum(inside) // sharding.num_layers(self.config))
        """Elements of one layer, without stacked experts."""

    @property
    def loading(self) -> int:
        """Bytes of weights at most while they are made or read."""
        config, start = self.config, self.state.start or self.state.weights
        if not config.ranks.shards_weights or isinstance(config.model, PretrainedModel):
            return start
        # A tied head is drawn by itself, and has its part until it is tied.
        tied = max((prod(w.shape) for w in self.parts if sharding.is_tied(w)), default=0)
        return start + FLOAT32_BYTES * tied // config.ranks.num_processes

    def of_checkpoints(self) -> list[MemoryPoint]:
        """Return the moments of reading and saving a rank's shard, by tensor or as a copy."""
        config, on_host = self.config, self.plan.device.kind == "cpu"
        largest = max(prod(w.shape) for w in self.parts) // config.ranks.num_processes
        piece, saved = on_host * FLOAT32_BYTES * largest, sharding.saved_bytes(self.plan)
        behind = config.train.checkpoint_async is not False
        copies = _range_from_zero(on_host * saved) if behind else ZERO_RANGE
        # Files are mapped: numbers are copied only for ranks that hold other rows.
        sizes = {"resume": _range_from_zero(0, high=piece), "save": copies}
        held = self.held("between", ZERO_RANGE)
        return [MemoryPoint(phase, held | {"saving": size}, phase)
                for phase, size in sizes.items() if saved]  # fmt: skip

    def of_sharing(self) -> list[MemoryPoint]:
        """Return the moments that only FSDP2 or ZeRO has."""
        ranks = self.plan.ranks
        if ranks.fsdp:  # the head is gathered before there are logits
            parts = self.held("gathered", self.earlier) | self.kept(self.acts.casts)
            return [MemoryPoint("forward", parts, "gathered"), *self.of_gathering()]
        if not ranks.zero_stage:
            return []
        whole = exact_range(self.state.gradients)
        found = [MemoryPoint("backward", self.held("reduced", whole), "reduced")]
        if ranks.zero_stage == 2:
            parts = self.last_layer().parts
            # Bytes kept by half of the layers, plus or minus a quarter.
            half = {
                name: Range(part.low // 4, part.expected // 2, part.high * 3 // 4)
                for name, part in parts.items()
                if name in ("activations", "autocast")
            }
            found.append(
                MemoryPoint("backward", parts | self.held("middle", whole) | half, "middle")
            )
        new = self.held("evaluation", ZERO_RANGE)
        more = sharding.regather_bytes(self.plan, self.parts)
        new["buffers"] = new["buffers"] + Range(0, more, more)
        return [*found, MemoryPoint("optimizer", new, "regather")]

    def of_gathering(self) -> Iterator[MemoryPoint]:
        """Moments at which a CPU has gathered a layer that has not yet computed."""
        shape, count = shape_of(self.plan, evaluated(self.plan)), sharding.num_layers(self.config)
        parts = self.held("evaluation_gathered", ZERO_RANGE)
        stream = 2 * FLOAT32_BYTES * shape.tokens * shape.hidden
        parts["activations"] = _range_from_zero(stream, high=2 * self.acts.one_layer + _SMALL_BYTES)
        yield MemoryPoint("evaluation", parts, "evaluation_gathered")
        if self.plan.device.kind != "cpu":  # a GPU gathers during the layer before
            return
        is_tied = self.config.model.tie_word_embeddings
        outer = 0 if is_tied else self.last_layer().parts["gradients"].expected
        whole = self.state.gradients
        inner = self.plan.compute.weight_bytes * self.layer * count
        inner = min(inner // self.plan.ranks.shards, whole)
        for done in {1, count - 1} - {0}:  # layers whose backward pass is over
            made = whole if self.plan.batch.accumulation > 1 else outer + inner * done // count
            parts = self.held("next_layer", range_around(0, made, whole))
            kept = self.kept(self.acts.casts_kept).items()
            left = {
                name: range_around(0, part.expected * (count - done) // count, part.high)
                for name, part in kept
            }
            yield MemoryPoint("backward", parts | left, "next_layer")

    def held(self, moment: str, gradients: Range) -> _Parts:
        """Return weights, states, gradients and buffers at a moment."""
        state = self.state
        mine, buffers = sharding.held_at(self.plan, self.parts, state.gradients, moment, gradients)
        views = singular_vectors(self.plan, self.parts)
        parts = {
            "weights": exact_range(state.weights),
            "gradients": mine,
            "optimizer": Range(state.optimizer, state.optimizer + views, state.optimizer + views),
            "master": exact_range(state.master),
            "buffers": buffers,
        }
        if self.plan.ranks.zero_stage and self.plan.ranks.deepspeed_config:
            parts = {name: Range(0, part.expected, part.high) for name, part in parts.items()}
        return parts

    @property
    def earlier(self) -> Range:
        """Gradients of earlier micro-batches of the step."""
        several = self.plan.batch.accumulation > 1
        return exact_range(self.state.gradients) if several else ZERO_RANGE

    def kept(self, casts: int) -> _Parts:
        """Return activations of all layers, and 16-bit copies of weights."""
        acts, compiled = self.acts, self.config.compile.option not in ("none", "eager")
        casts_all = self.plan.compute.autocast and not self.config.peft.is_on
        share = COMPILED_AUTOCAST_SHARE if casts_all else COMPILED_SHARE
        share = share if compiled and acts.passing == 0 else 1.0
        low = acts.needed
        if compiled or self.plan.compute.float8 != "off" or self.config.kernels.is_liger:
            low //= 4  # cheap operations are recomputed, operands are kept in 8 bits
        expected = int(acts.kept * share)
        doubt = self.doubt * acts.kept
        # ZeRO-3's linear layers keep the weight itself, which is gathered again (deepspeed 0.19.8,
        # runtime/zero/linear.py, `save_for_backward`).
        copies = 0 if self.plan.ranks.zero_stage == 3 else casts
        return {
            "activations": _range_from_zero(expected, low, int(doubt + _SMALL_BYTES)),
            "autocast": Range(0, copies, casts),
        }

    @property
    def doubt(self) -> float:
        """Largest ratio of activations to their formula."""
        shape, config = self.shape, self.config
        doubt = _SLACK_HIGH
        if not shape.architecture.is_known:
            doubt = 3.0
        elif config.peft.is_on:
            doubt = 1.6
        elif config.engine.is_trainer or shape.masked or shape.experts:
            doubt = 1.3
        if self.plan.compute.float8 != "off":
            doubt += 0.3  # 8-bit operands in addition to 16-bit ones
        if config.attention.option not in ("sdpa", "eager") or not shape.on_cpu:
            doubt += 0.05  # workspace of kernels
        return doubt

    def forward(self) -> MemoryPoint:
        """Return the end of the forward pass, with all logits."""
        acts = self.acts
        parts = self.held("forward", self.earlier) | self.kept(acts.casts)
        parts["logits"] = _range_from_zero(acts.logits_forward, high=2 * acts.logits_forward)
        return MemoryPoint("forward", parts, "forward")

    def loss(self) -> MemoryPoint:
        """Return the start of the backward pass: probabilities, their and the logits' gradients."""
        acts = self.acts
        parts = self.held("loss", self.earlier) | self.kept(acts.casts_kept)
        room = acts.logits_backward + acts.logits_forward
        fused = (
            self.config.kernels.fused_linear_cross_entropy
            or self.config.kernels.is_on
            or self.config.engine.is_trainer
        )
        low = 0 if fused or self.config.compile.is_on else acts.logits_needed
        parts["logits"] = _range_from_zero(acts.logits_backward, low, room)
        return MemoryPoint("backward", parts, "loss")

    def last_layer(self) -> MemoryPoint:
        """Return the last layer's backward pass: activations of all layers, the head's gradient."""
        acts = self.acts
        weight_bytes = self.plan.compute.weight_bytes
        layer = weight_bytes * self.layer
        has_trained_head = self.config.targets.per_token and not self.config.peft.is_on
        head = has_trained_head * weight_bytes * self.shape.vocabulary * self.shape.hidden
        shards = self.plan.ranks.shards if self.plan.ranks.fsdp else 1
        head = min(head // shards, self.state.gradients)
        gradients = range_around(0, head, min(2 * head + layer, 2 * self.state.gradients))
        if self.plan.batch.accumulation > 1:
            # A new gradient exists until it is added, expected: one of a third of the layer.
            gradients = self.earlier + range_around(0, layer // 3, gradients.high)
        parts = self.held("last_layer", gradients) | self.kept(acts.casts_kept)
        parts["recomputed"] = _range_from_zero(acts.passing)
        # bitsandbytes unpacks one 4-bit weight at a time.
        unpacked = max((prod(w.shape) for w in self.parts if w.four_bits), default=0)
        working = acts.working + self.shape.compute * unpacked
        parts["temporaries"] = _range_from_zero(working, high=2 * working)
        if acts.passing:  # casts of the recomputed layer
            parts["autocast"] = range_around(0, parts["autocast"].expected, acts.casts)
        return MemoryPoint("backward", parts, "last_layer")

    def first_layer(self) -> MemoryPoint:
        """Return the first layer's backward pass: all gradients but its own exist."""
        acts, own = self.acts, self.plan.compute.weight_bytes * self.layer
        whole = self.state.gradients
        own = 0 if self.config.memory.optimizer_in_backward or self.config.peft.is_on else own
        own = 0 if self.plan.batch.accumulation > 1 else min(own, whole)
        parts = self.held("first_layer", range_around(whole - own, whole - own // 2, whole))
        layer = int(self.doubt * acts.one_layer)
        parts["recomputed"] = range_around(0, acts.passing, max(acts.passing, layer) + _SMALL_BYTES)
        parts["temporaries"] = _range_from_zero(acts.working, high=2 * acts.working)
        return MemoryPoint("backward", parts, "first_layer")

    def embedding(self) -> MemoryPoint:
        """Return the end of the backward pass, with gradients of the embedding and a tied head."""
        number, model = self.plan.compute.weight_bytes, self.config.model
        table = number * self.shape.vocabulary * self.shape.hidden
        is_tied = model.tie_word_embeddings and self.config.targets.per_token
        # torch sums two gradients of one table into a third.
        several = is_tied or family_of(self.config).is_encoder_decoder
        times = 2 if several else int(self.plan.batch.accumulation > 1)
        if self.config.peft.is_on or self.plan.ranks.fsdp:
            table = 0
        parts = self.held("embedding", exact_range(self.state.gradients))
        more = times * min(table, self.state.gradients)
        high = 3 * table + self.acts.working + _SMALL_BYTES
        parts["temporaries"] = _range_from_zero(more, high=high)
        return MemoryPoint("backward", parts, "embedding")

    def optimizer(self) -> MemoryPoint:
        """Return the optimizer's step, or its updates within the backward pass."""
        parts = self.held("optimizer", exact_range(self.state.gradients))
        found = optimizer_temporaries(self.plan, self.parts)
        parts["temporaries"] = found + Range(0, 0, _SMALL_BYTES)
        return MemoryPoint("optimizer", parts, "optimizer")

    def evaluation(self) -> MemoryPoint:
        """Return a forward pass that keeps no activations. Gradients are already freed."""
        acts = Activations(self.plan, shape_of(self.plan, evaluated(self.plan)), self.parts)
        parts = self.held("evaluation", ZERO_RANGE)
        parts["activations"] = _range_from_zero(
            acts.one_layer // 2, high=2 * acts.one_layer + _SMALL_BYTES
        )
        parts["logits"] = _range_from_zero(acts.logits_forward, high=2 * acts.logits_forward)
        # A copy is freed after its product (`cache_enabled=False`). ZeRO-3's product casts a view.
        cast = acts.largest_cast * (self.plan.ranks.zero_stage != 3)
        cast = cast if self.plan.compute.eval_autocast else 0
        parts["autocast"] = range_around(0, cast, acts.casts)
        return MemoryPoint("evaluation", parts, "evaluation")
