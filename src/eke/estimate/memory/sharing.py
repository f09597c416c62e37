"""Buffers of what shares a model out between processes: on one device, beside the shared state."""

from dataclasses import dataclass
from math import prod

from eke.config.schema import FSDP, Config
from eke.estimate.memory import zero
from eke.estimate.memory.ranges import NOTHING, spread
from eke.estimate.memory.shape import is_fsdp
from eke.estimate.memory.values import Range
from eke.estimate.memory.zero import Parts
from eke.models.families import is_classification
from eke.models.sizes import STAGE, Role, weight_bytes
from eke.plan.planner import Plan


@dataclass(frozen=True)
class Held:
    """What is alive at one moment of what processes share."""

    gradients: Range
    buffers: Range


def held_at(plan: Plan, parts: Parts, whole: int, moment: str, gradients: Range) -> Held:
    """Gradients, and bytes of gathered weights, buckets and staging areas, at one moment.

    Args:
        plan: of the run.
        parts: `eke.models.sizes.training_structure` of the plan's configuration.
        whole: bytes of the training state's gradients.
        moment: a name among those of `eke.estimate.memory.phases`.
        gradients: what a process without others holds then.
    """
    config = plan.config
    option = config.distributed.option
    if is_fsdp(config):
        return Held(gradients, _fsdp(plan, parts, moment))
    if option in STAGE:
        gathered = zero.gathered_weights(plan, parts)
        return Held(
            zero.gradients_at(plan, parts, moment, gradients),
            zero.buffers_at(plan, parts, moment, gathered),
        )
    if option == "ddp" and plan.batch.world_size > 1:
        return _ddp(plan, parts, whole, moment, gradients)
    if option == "dp":
        # The first device also has the gathered results of the others.
        return Held(gradients, spread(0, whole // 10, whole))
    return Held(gradients, NOTHING)


def _ddp(plan: Plan, parts: Parts, whole: int, moment: str, gradients: Range) -> Held:
    """Gradients live in the buckets that are sent, which stay from the first step on.

    Each is computed into a tensor of its own and copied there; those of earlier micro-batches wait
    outside until the last one's are ready. A tied table's waits for both of its uses. Source: torch
    2.13, torch/csrc/distributed/c10d/reducer.cpp, `initialize_buckets` and
    `mark_variable_ready_dense` with `gradient_as_bucket_view`.
    """
    config = plan.config
    buckets = Range(min(gradients.low, whole), whole, whole)
    several = plan.batch.accumulation > 1
    trained = [w for w in parts if w.trained]
    number = min(weight_bytes(config), whole)
    matrix = number * max((prod(w.shape) for w in trained if w.role is Role.hidden), default=0)
    table = number * max((prod(w.shape) for w in trained if w.role is Role.embedding), default=0)
    tied = table if config.model.tie_word_embeddings and not is_classification(config) else 0
    if moment in ("forward", "loss", "optimizer", "evaluation"):
        outside = whole if several and moment in ("forward", "loss") else 0
        return Held(buckets, spread(0, outside, outside))
    if moment == "last_layer":
        before = whole if several else 0
        return Held(buckets, spread(0, before + tied + matrix, before + whole))
    own = table if moment == "embedding" else tied + matrix
    return Held(buckets, spread(0, own, max(own, (1 + several) * whole)))


def layer_numbers(config: Config, weights: Parts) -> tuple[int, int]:
    """Numbers of the largest layer, and of what lies outside of layers."""
    layers = max(1, config.model.num_hidden_layers)
    if config.model.family == "t5":
        layers += getattr(config.model, "num_decoder_layers", None) or layers
    outside = sum(prod(w.shape) for w in weights if w.role in (Role.embedding, Role.outer))
    inside = sum(prod(w.shape) for w in weights) - outside
    return -(-inside // layers), outside


def _fsdp(plan: Plan, parts: Parts, moment: str) -> Range:
    """Each layer's weights whole, the next one gathered meanwhile, and gradients to be reduced.

    Source: torch.distributed.fsdp.fully_shard, FSDP2: what lies around the layers stays gathered
    through forward and backward pass; a layer at work is, while the next one's pieces arrive, and
    reduce-scatter has the layer's whole gradients as its input. On a CPU gloo's all-gather has an
    output of its own beside (torch 2.13, ProcessGroupGloo.cpp, `_allgather_base`).
    """
    config = plan.config
    assert isinstance(config.distributed, FSDP)
    numbers, around = layer_numbers(config, parts)
    number = weight_bytes(config)
    layer, outside = number * numbers, number * around
    if config.distributed.num_processes == 1:
        return spread(0, 0, 3 * layer + 2 * outside)
    stays = outside
    if not config.distributed.reshard_after_forward:
        stays += layer * config.model.num_hidden_layers
    more = 1 if plan.device.kind == "cpu" else 0
    layers = {"last_layer": 3 + more, "middle": 3 + more, "first_layer": 2}
    expected = stays + layers.get(moment, 0) * layer
    if moment == "embedding":  # its gradients, put together to be scattered
        expected = stays + outside
    if moment == "optimizer":
        expected = 0
    if moment == "evaluation":
        expected = stays + (2 + more) * layer
    low = min(layer, expected)
    return spread(low, expected, 2 * stays + (6 + more) * layer + 2 * outside)
