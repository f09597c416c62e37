"""Buffers of sharded training on one device, in addition to the sharded state.

Formulas for ZeRO follow deepspeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py, and name the
functions. Bytes are of the first process. On a CPU, offloaded state is also counted, since host and
device share one memory.
"""

from math import prod
from typing import cast

from eke.config.schema import FSDP, Config
from eke.estimate.memory.components import (
    ZERO_RANGE,
    Range,
    exact_range,
    range_around,
)
from eke.models.families import FLOAT32_BYTES, Role, Tokens, Weight, family_of
from eke.models.sizes import (
    adds_up_whole,
    flat_shard_sizes,
    sent_bytes,
    shared_state_bytes,
    trained_weights,
)
from eke.plan.planner import Plan

_Parts = tuple[Weight, ...]
"""Weights of the configuration from `eke.models.sizes.training_structure`."""

_BACKWARD = ("last_layer", "middle", "first_layer", "embedding", "reduced")
"""Moments of the backward pass after its first gradient."""

_REUSE_DISTANCE = 10**9
"""Elements of `stage3_max_reuse_distance` by default: deepspeed 0.19.8, runtime/zero/config.py."""


class _Sizes:
    """Bytes of a model sharded by DeepSpeed, in the weights' format."""

    def __init__(self, plan: Plan, parts: _Parts) -> None:
        mine, stage = flat_shard_sizes(plan.config), plan.ranks.zero_stage
        trained = [w for w in parts if w.trained]
        number = self.number = plan.compute.weight_bytes
        self.whole = number * sum(prod(w.shape) for w in trained)
        self.largest = number * max((prod(w.shape) for w in trained), default=0)
        """Bytes of the largest trained tensor."""
        self.mine = number * sum(_touched(trained, role, size) for role, size in mine.items())
        """Bytes of the full gradients of all tensors of which this process has a shard."""
        self.numbers = sum(mine.values())
        """Elements in all flat shards."""
        self.partition = number * self.numbers
        """Bytes of this process's shard of all gradients."""
        self.group = max(mine.values(), default=0)
        """Elements in the largest flat shard."""
        # ZeRO-1 and 2 fill one bucket while the other is sent. ZeRO-3 has one (`IPGBucketZ3`).
        copies = 2 if stage < 3 and _setting(plan, "overlap_comm") else 1
        self.bucket = number * copies * _setting(plan, "reduce_bucket_size")
        """Bytes of all buckets of `reduce_bucket_size`."""
        self.early = Role.outer in mine
        """True if this process has a shard of a head, whose gradient comes first."""


def _touched(trained: list[Weight], role: Role, size: int) -> int:
    """Return the elements of the tensors that begin within the first `size` of a group."""
    start = found = 0
    for weight in (w for w in trained if w.role is role):
        if start < size:
            found += prod(weight.shape)
        start += prod(weight.shape)
    return found


def _setting(plan: Plan, key: str) -> int:
    value = (plan.deepspeed or {}).get("zero_optimization", {}).get(key, 0)
    return int(value) if isinstance(value, int | float) else 0


def _step_bytes(plan: Plan, sizes: _Sizes) -> int:
    """Return the bytes of float32 gradients that the step creates (with offloading, none).

    ZeRO-1 and 2 flatten one group at a time, and copy narrow gradients to float32 (`step`:
    `flatten`, `.to`). So does ZeRO-3 (`_prepare_fp32_grad_for_sub_group`).
    """
    if plan.config.offload.is_on:
        return 0
    narrow = sizes.number if sizes.number < FLOAT32_BYTES else 0
    return sizes.group * (FLOAT32_BYTES + narrow)


def _zero_gradients(plan: Plan, sizes: _Sizes, moment: str, plain: Range) -> Range:
    """Return the bytes of gradients: ZeRO-1 keeps all until the backward pass ends.

    ZeRO-2 keeps full gradients of tensors with a shard here (`copy_grads_in_partition`:
    `grads_in_partition`), ZeRO-3 its shard, permanently (`grad_partitions_flat_buffer`).
    """
    stage = plan.ranks.zero_stage
    offload, on_host = plan.config.offload.is_on, plan.device.kind == "cpu"
    if stage == 3:
        return exact_range(sizes.partition) if on_host or not offload else ZERO_RANGE
    if stage == 1:
        if moment == "optimizer":
            return ZERO_RANGE if offload else range_around(sizes.partition, sizes.mine, sizes.whole)
        return ZERO_RANGE if moment == "evaluation" else plain
    if offload or moment == "evaluation":
        return ZERO_RANGE
    several = plan.batch.accumulation > 1
    earlier = sizes.mine if several else 0  # `all_grad_tensors`: of earlier micro-batches
    if moment in ("forward", "loss"):
        return exact_range(earlier)
    if moment == "last_layer":
        return range_around(earlier, earlier + sizes.mine * sizes.early, earlier + sizes.mine)
    low = sizes.partition if moment != "middle" else earlier
    return range_around(low, sizes.mine if moment == "optimizer" else sizes.mine + earlier,
                  2 * sizes.mine)  # fmt: skip


def _zero_buffers(plan: Plan, parts: _Parts, sizes: _Sizes, moment: str) -> Range:
    """Return the bytes of buckets, staging areas, gradients in transfer and gathered weights."""
    stage = plan.ranks.zero_stage
    always = _staging(plan, sizes)
    if stage == 3:  # the bucket is permanent (`ipg_buckets`)
        gathered = _gathered_weights(plan, parts)
        always += sizes.bucket + gathered.low
        high = always + gathered.high
        if moment == "optimizer":
            more = _step_bytes(plan, sizes)
            return range_around(0, always + more, high + 2 * more)
        if moment == "embedding":  # a large gradient is scattered separately, maybe with a copy
            high += 2 * sizes.largest
        return range_around(0, always + gathered.expected, high)
    expected, more = always, 0
    if moment in _BACKWARD:  # `setup_buckets`, at the first gradient
        expected, more = always + sizes.bucket, sizes.largest
    if moment == "reduced" and stage == 1 and not plan.config.offload.is_on:
        # ZeRO-1 copies its gradients into a separate buffer. Gradients in the bucket have by then
        # left their first place (`reduce_gradients`, `copy_grads_in_partition`).
        expected, more = always + sizes.mine, sizes.bucket + sizes.largest
    if moment == "optimizer":
        expected, more = always + _step_bytes(plan, sizes), 2 * sizes.group * FLOAT32_BYTES
    doubt = sizes.mine if plan.config.offload.is_on else sizes.bucket
    return range_around(0, expected, expected + more + doubt)


def _staging(plan: Plan, sizes: _Sizes) -> int:
    """Return the bytes that offloading keeps across steps: float32 gradients, and tensor buffers.

    Sources: stage_1_and_2.py, `initialize_optimizer_states`, `temp_grad_buffer_for_cpu_offload`,
    `param_buffer_of_bit16_for_cpu_offload_groups` and, the only one on a GPU,
    `temp_grad_buffer_for_gpu_offload`; stage3.py, `subgroup_gradient_buffer`.
    """
    if not plan.config.offload.is_on:
        return 0
    staged = plan.ranks.zero_stage < 3
    if plan.device.kind != "cpu":
        return sizes.largest * staged
    narrow = sizes.partition + 2 * sizes.largest if staged else 0
    several = sizes.mine if staged and plan.batch.accumulation > 1 else 0
    return FLOAT32_BYTES * sizes.numbers + narrow + several


def regather_bytes(plan: Plan, parts: _Parts) -> int:
    """Return the bytes to exchange new weights on a CPU: a full copy of the largest group.

    DeepSpeed gathers a group at once (runtime/utils.py, `all_gather_into_tensor_dp_groups`), gloo
    into its own output (torch 2.13, ProcessGroupGloo.cpp, `_allgather_base`).
    """
    if plan.device.kind != "cpu" or plan.ranks.zero_stage == 3 or plan.batch.world_size == 1:
        return 0
    sizes = _Sizes(plan, parts)
    return sizes.number * sizes.group * plan.batch.world_size


def _gathered_weights(plan: Plan, parts: _Parts) -> Range:
    """Return the full weights in ZeRO-3: small ones, the current module's, and prefetched ones.

    partitioned_param_coordinator.py prefetches up to `stage3_prefetch_bucket_size` and keeps
    weights that are used again within the next `stage3_max_reuse_distance` elements.
    Tensors fetched together are copied out of one buffer (partition_parameters.py,
    `AllGatherCoalescedHandle.wait`).
    """
    each = [prod(w.shape) for w in parts]  # elements, as all sizes until the return
    limit = _setting(plan, "stage3_param_persistence_threshold")
    small = sum(size for size in each if size <= limit)  # always gathered
    stacked = sum(prod(w.shape) for w in parts if len(w.shape) > 2 and w.role is Role.outer)
    experts = stacked // max(1, plan.config.model.num_hidden_layers)
    table = max((prod(w.shape) for w in parts if w.role is Role.embedding), default=0)
    prefetched = _setting(plan, "stage3_prefetch_bucket_size")
    # A layer's experts are fetched together: one buffer and its copy.
    at_work = (2 * experts + table if experts else max(each, default=0)) + prefetched
    reused = _setting(plan, "stage3_max_reuse_distance") or _REUSE_DISTANCE
    most = min(sum(each), small + reused + at_work)
    sizes = (small, at_work, 2 * most + at_work)
    return range_around(*(plan.compute.weight_bytes * size for size in sizes))


def saved_bytes(plan: Plan) -> int:
    """Return the bytes that a rank saves: its shard of states and weights or adapters, else 0."""
    config, ranks = plan.config, plan.ranks
    if ranks.num_processes == 1 or not ranks.shards_states:
        return 0
    state = shared_state_bytes(config, plan.size, host=True, formats=plan.compute)
    weights = state.weights
    if config.peft.is_on:
        weights = FLOAT32_BYTES * sum(prod(w.shape) for w in trained_weights(config))
    whole = config.peft.is_on or not ranks.shards_weights
    return weights // (ranks.shards if whole else 1) + state.optimizer + state.master


def held_at(
    plan: Plan, parts: _Parts, whole: int, moment: str, gradients: Range
) -> tuple[Range, Range]:
    """Return gradients, and other buffers, at a moment. `gradients`: those of a single process."""
    if plan.ranks.fsdp:
        return gradients, _fsdp(plan, parts, moment)
    if plan.ranks.zero_stage:
        moment = moment if moment != "between" else "evaluation"
        sizes = _Sizes(plan, parts)
        held = _zero_gradients(plan, sizes, moment, gradients)
        return held, _zero_buffers(plan, parts, sizes, moment)
    if plan.ranks.is_ddp and plan.batch.world_size > 1:
        return Range(min(gradients.low, whole), whole, whole), _ddp(plan, parts, whole, moment)
    if plan.ranks.is_dp:
        # The first device also has the gathered outputs of the others.
        return gradients, range_around(0, whole // 10, whole)
    return gradients, ZERO_RANGE


def _ddp(plan: Plan, parts: _Parts, whole: int, moment: str) -> Range:
    """Return the gradients outside of DDP's buckets, which are permanent from the first step on.

    Each gradient is computed in a separate tensor and copied into a bucket. Gradients of earlier
    micro-batches, and of a tied table's first use, wait outside. Source: torch 2.13, reducer.cpp,
    `initialize_buckets` and `mark_variable_ready_dense` with `gradient_as_bucket_view`.
    """
    config = plan.config
    before = whole if plan.batch.accumulation > 1 else 0
    trained = [w for w in parts if w.trained]
    number = min(plan.compute.weight_bytes, whole)
    matrix = number * max((prod(w.shape) for w in trained if w.role is Role.hidden), default=0)
    table = number * max((prod(w.shape) for w in trained if w.role is Role.embedding), default=0)
    tied = table if config.model.tie_word_embeddings and config.targets.per_token else 0
    if moment in ("optimizer", "evaluation"):
        return ZERO_RANGE
    if moment in ("forward", "loss"):
        return range_around(0, before, before)
    if moment == "last_layer":
        return range_around(0, before + tied + matrix, before + whole)
    own = table if moment == "embedding" else tied + matrix
    return range_around(0, own, max(own, before + whole))


def num_layers(config: Config) -> int:
    """Return the number of layers in all stacks."""
    layers = max(1, config.model.num_hidden_layers)
    if family_of(config).is_encoder_decoder:
        layers += getattr(config.model, "num_decoder_layers", None) or layers
    return layers


_Unit = list[int]
"""Bytes that FSDP2 gathers at once: weights as sent, gradients, and gradients as reduced."""


def units(plan: Plan, parts: _Parts) -> list[_Unit]:
    """Return the units: one layer, tables only used for lookups, and the head or a tied table.

    `eke.training.distributed.fsdp.shard_model` splits a model in the same way. Gradients are as
    narrow as sent weights, except with the fused loss, and if norms among them are not narrow.
    """
    config, formats, found = plan.config, plan.compute, [[0, 0, 0] for _ in range(3)]
    for weight in parts:
        is_table, is_matrix = weight.role is Role.embedding, len(weight.shape) == 2
        is_head = is_tied(weight) or (weight.role is Role.outer and is_matrix)
        exact = config.kernels.fused_linear_cross_entropy if is_head else not formats.copies
        sent = sent_bytes(config, formats, weight)
        wide = prod(weight.shape) * (FLOAT32_BYTES if weight.is_adapter else formats.weight_bytes)
        narrow, mine = wide if exact else sent, found[2 if is_head else int(is_table)]
        trained = (narrow, wide) if weight.trained else (0, 0)
        mine[:] = map(sum, zip(mine, (sent, *trained), strict=True))
    found[0] = [size // num_layers(config) for size in found[0]]
    return found


def is_tied(weight: Weight) -> bool:
    """Return whether a table is the output layer's matrix, too."""
    return weight.role is Role.embedding and weight.tokens is not Tokens.none


def _fsdp(plan: Plan, parts: _Parts, moment: str) -> Range:
    """Return the bytes of gathered weights, and of full gradients before they are scattered.

    A unit is gathered into one buffer and copied out of it, on a GPU while the previous unit
    computes. A buffer of gradients is freed when the next one is filled. The head stays gathered
    until it has a gradient. With a tied table all tables are one unit, gathered to the end. On a
    CPU, gloo gathers into a separate buffer, and this rank's shard is rounded before it is sent.
    Source: torch 2.13, _fully_shard, `wait_for_unshard` and `post_backward`;
    ProcessGroupGloo.cpp, `_allgather_base`.
    """
    sharing, on_cpu = cast(FSDP, plan.ranks.fsdp), plan.device.kind == "cpu"
    layer, table, head = units(plan, parts)
    gradient, is_one = head[1], any(map(is_tied, parts))
    if is_one:
        head, table = [sum(pair) for pair in zip(head, table, strict=True)], [0, 0, 0]
    every, rows = (layer, table, head), head if is_one else table
    wide = rows[2] if plan.compute.copies else 0  # gradients of 16-bit rows are summed in float32
    # A tied table's gradient waits for its rows' gradient, unless added to earlier gradients.
    tied = (head[0] + gradient * (not adds_up_whole(plan.config))) * is_one
    ahead, before = (0, head[0] * is_one) if on_cpu else (layer[0], 0)

    def gathering(unit: _Unit) -> int:
        rounded = unit[0] // sharing.shards if unit[0] < unit[2] else 0
        return 2 * unit[0] + on_cpu * rounded

    def turn(unit: _Unit, before: int) -> int:
        whole, gradients, reduced = unit
        # A layer's gradients replace its activations.
        computing = whole + (gradients // 2 if unit is layer else gradients)
        return ahead + max(before + computing, gradients + reduced)

    kept = 0 if sharing.reshard_after_forward else layer[0] * num_layers(plan.config)
    last = max(turn(layer, 0 if tied else head[2]), 0 if tied else turn(head, 0))
    expected = {
        "gathered": kept + gathering(head),  # the buffer is freed before the loss
        "forward": kept + head[0],
        "loss": kept + head[0],
        "last_layer": kept + tied + last,
        "next_layer": kept + tied + layer[2] + (0 if kept else gathering(layer)),
        "first_layer": tied + turn(layer, layer[2]),
        # A tied table's two gradients are added before they are sharded.
        "embedding": turn(
            [rows[0] * is_one + wide, *rows[1:]],
            layer[2] + gradient * is_one - rows[2] // sharing.shards,
        ),
        "optimizer": 0,
        "evaluation": max(head[0], before + layer[0]) + ahead,
        "evaluation_gathered": max(before + gathering(layer), *map(gathering, every)) + ahead,
    }.get(moment)
    if expected is None or sharing.num_processes == 1:
        return range_around(0, 0, 2 * (expected or 0))
    more = 2 * max(sent + reduced for sent, _, reduced in every)
    return range_around(min(layer[0], expected), expected, 2 * expected + more)
