"""Buffers of what shares a model out between processes: on one device, beside the shared state."""

from math import prod

from eke.forecast.ranges import NOTHING, spread
from eke.forecast.shape import is_fsdp
from eke.forecast.values import Range
from eke.plan import Plan
from eke.schema import FSDP, Config
from eke.sizes import FLOAT32_BYTES, STAGE, Role, Weight, weight_bytes

Parts = tuple[Weight, ...]
"""Tensors of the model as it is trained."""


def buffers(plan: Plan, held: int, parts: Parts) -> Range:
    """Bytes of gathered weights, buckets and staging areas while a step runs.

    Args:
        plan: of the run.
        held: bytes of the whole model's gradients.
        parts: `eke.sizes.training_structure` of the plan's configuration.
    """
    config = plan.config
    option = config.distributed.option
    if is_fsdp(config):
        return _fsdp(config, parts)
    if option in STAGE:
        return _zero(plan, parts)
    if option == "ddp" and plan.batch.world_size > 1:
        # Gradients live in the buckets (gradient_as_bucket_view); before the first step's end the
        # buckets are built anew in the order of the backward pass, both alive.
        return spread(0, 0, held)
    if option == "dp":
        # The first device also has the gathered results of the others.
        return spread(0, held // 10, held)
    return NOTHING


def layer_numbers(config: Config, weights: Parts) -> tuple[int, int]:
    """Numbers of the largest layer, and of what lies outside of layers."""
    layers = max(1, config.model.num_hidden_layers)
    if config.model.family == "t5":
        layers += getattr(config.model, "num_decoder_layers", None) or layers
    outside = sum(prod(w.shape) for w in weights if w.role in (Role.embedding, Role.outer))
    inside = sum(prod(w.shape) for w in weights) - outside
    return -(-inside // layers), outside


def _fsdp(config: Config, parts: Parts) -> Range:
    """Each layer's weights whole, the next one gathered meanwhile, and gradients to be reduced.

    Source: torch.distributed.fsdp.fully_shard, FSDP2: gathered weights of the layer at work and
    of the one that is prefetched; reduce-scatter has the layer's whole gradients as its input.
    """
    assert isinstance(config.distributed, FSDP)
    layer, outside = layer_numbers(config, parts)
    number = weight_bytes(config)
    if config.distributed.num_processes == 1:
        return spread(0, 0, number * (3 * layer + 2 * outside))
    low = number * layer
    gathered = number * (2 * layer + outside)
    if not config.distributed.reshard_after_forward:
        gathered = number * (layer * config.model.num_hidden_layers + outside)
    return spread(low, gathered + number * layer, 2 * gathered + number * (3 * layer + 2 * outside))


def _zero(plan: Plan, parts: Parts) -> Range:
    """Reduce and all-gather buckets; of ZeRO-3 also the gathered weights of a layer.

    Sizes are those of DeepSpeed's configuration, in numbers (docs: `reduce_bucket_size`,
    `allgather_bucket_size`, `stage3_prefetch_bucket_size`, `stage3_max_live_parameters`).
    """
    zero = (plan.deepspeed or {}).get("zero_optimization", {})
    config = plan.config
    bucket = _numbers(zero, "reduce_bucket_size")
    gather = _numbers(zero, "allgather_bucket_size") or _numbers(
        zero, "stage3_prefetch_bucket_size"
    )
    total = sum(prod(w.shape) for w in parts)
    layer, outside = layer_numbers(config, parts)
    bucket, gather = min(bucket, total), min(gather, total)
    copies = 2 if zero.get("overlap_comm") else 1
    expected = FLOAT32_BYTES * (copies * bucket + gather)
    high = FLOAT32_BYTES * (3 * bucket + 2 * gather + total)
    if STAGE[config.distributed.option] == 3:
        expected += FLOAT32_BYTES * (layer + outside)
        high += FLOAT32_BYTES * (4 * layer + 2 * outside)
    return spread(0, expected, max(expected, high))


def _numbers(zero: object, key: str) -> int:
    value = zero.get(key, 0) if isinstance(zero, dict) else 0
    return int(value) if isinstance(value, int | float) else 0
