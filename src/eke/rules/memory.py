"""Rules about memory techniques, and a search for changes that make the state fit."""

import functools
from collections.abc import Iterator
from dataclasses import replace

from eke.common.errors import Fix
from eke.config.schema import FSDP, Checkpointing, Compute, Config, Offload, Weights
from eke.models.sizes import (
    STAGE,
    StateBytes,
    decide_formats,
    model_size,
    optimizer_entry,
    shared_state_bytes,
)
from eke.rules.rule import (
    AMPERE,
    Rule,
    RuleInputs,
    if_changed,
    instead_of,
    older_than,
    without_effect,
)
from eke.rules.techniques import TECHNIQUES, applied

_LOMO = "arXiv:2306.09782, section 3"
_PARTITIONED = ("inductor", "aot_eager", "cudagraphs")
"""Compilers whose backward pass is one call that returns all gradients."""


def _rotates_what_is_kept(facts: RuleInputs) -> bool:
    """Return whether Liger overwrites the projections that selective checkpointing keeps."""
    # Normalised heads are new tensors. Unknown architectures count as affected.
    family = facts.model_family
    return (
        facts.config.kernels.option == "liger"
        and facts.config.memory.checkpointing is Checkpointing.selective
        and (family.has_liger or not family.is_known)
        and not family.norms_heads
    )


def accumulates(facts: RuleInputs) -> bool:
    """Return whether a step has several micro-batches. batch=auto counts as one sample."""
    batch = facts.config.batch
    if batch.target is not None:
        return batch.target > batch.micro_batch * facts.distributed.num_processes
    return (batch.accumulation or 1) > 1


def _one_micro_batch(facts: RuleInputs) -> Fix:
    batch = facts.config.batch
    fixes = ["batch.accumulation=1"] if batch.accumulation is not None else []
    fixes += ["batch.target=null"] if batch.target is not None else []
    return Fix(*fixes)


def _without_scaling(facts: RuleInputs) -> Fix:
    option, compute = ("fp32", "float32") if older_than(facts, AMPERE) else ("bf16", "bfloat16")
    return instead_of(("fp16",), f"precision={option}", f"precision.compute={compute}")(facts)


def _one_process(facts: RuleInputs) -> Fix:
    if facts.config.offload.option != "none":  # offloading needs the processes
        return Fix("memory.optimizer_in_backward=false")
    distributed = facts.distributed
    several = ("distributed.num_processes=1",) if distributed.num_processes > 1 else ()
    return Fix("distributed=none", *several)


_in_backward_rule = functools.partial(if_changed, key="memory.optimizer_in_backward")

RULES = dict(
    every_n_needs_checkpointing=without_effect(
        key="memory.every_n",
        when=lambda f: f.config.memory.checkpointing is Checkpointing.off,
        why="has no effect: no layer is recomputed (memory.checkpointing is off)",
        fix=Fix("memory.checkpointing=full"),
        source="arXiv:1604.06174",
    ),
    selective_is_written_over=Rule(
        key="memory.checkpointing",
        when=_rotates_what_is_kept,
        why="kernels=liger overwrites the queries and keys that selective checkpointing keeps. "
        "Gradients would be wrong",
        fix=Fix("memory.checkpointing=full"),
        source="liger_kernel/ops/rope.py, rope_forward: contiguous() returns the same tensor",
        versions="liger-kernel 0.8.5",
    ),
    offload_needs_gpu=without_effect(
        key="memory.activation_offload",
        when=lambda f: f.on_cpu,
        why=lambda f: f"{f.device.name} is a CPU. Activations are already in host memory",
        source="https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.save_on_cpu",
    ),
    empty_cache_needs_gpu=without_effect(
        key="memory.empty_cache_every",
        when=lambda f: f.on_cpu,
        why=lambda f: f"{f.device.name} is a CPU. PyTorch caches no memory for it",
        source="https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.empty_cache.html",
    ),
    in_backward_cannot_clip=Rule(
        key="train.max_grad_norm",
        when=lambda f: f.config.memory.optimizer_in_backward and f.config.train.max_grad_norm,
        why="clipping needs all gradients. memory.optimizer_in_backward frees each one at once",
        fix=Fix("train.max_grad_norm=null"),
        source=_LOMO,
    ),
    in_backward_cannot_accumulate=_in_backward_rule(
        when=accumulates,
        why="each gradient is used and freed immediately and cannot be accumulated",
        fix=_one_micro_batch,
        source=_LOMO,
    ),
    in_backward_cannot_scale=_in_backward_rule(
        when=lambda f: f.config.precision.compute is Compute.float16,
        why="float16 loss scaling skips a step on overflow, which needs all gradients",
        fix=_without_scaling,
        source="https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling",
    ),
    in_backward_without_copies=_in_backward_rule(
        when=lambda f: (found := decide_formats(f.config)).master or found.copies,
        why=lambda f: (
            "precision.master=on updates all weights after the backward pass"
            if decide_formats(f.config).master
            else "precision.casts=per_step splits the gradient of a tied table"
        ),
        fix=lambda f: Fix(
            "precision.master=off" if decide_formats(f.config).master else "precision.casts=per_use"
        ),
        source=_LOMO,
    ),
    in_backward_is_one_process=_in_backward_rule(
        when=lambda f: (
            f.distributed.num_processes > 1 or f.distributed.option not in ("none", "ddp")
        ),
        why=lambda f: f"distributed={f.distributed.option} reduces gradients after the hooks ran",
        fix=_one_process,
        source="arXiv:2006.15704, section 3.2",
    ),
    in_backward_needs_other_optimizer=_in_backward_rule(
        when=lambda f: f.optimizer.fails_in_backward,
        why=lambda f: f"optimizer={f.config.optimizer.option} {f.optimizer.fails_in_backward}",
        fix=Fix("optimizer=adamw"),
        source="tests/equivalence/test_in_backward.py",
    ),
    in_backward_needs_parts=without_effect(
        key="memory.optimizer_in_backward",
        when=lambda f: f.config.compile.option in _PARTITIONED and not f.config.compile.regional,
        why=lambda f: f"compile={f.config.compile.option} returns all gradients in one call",
        fix=Fix("compile.regional=true"),
        source="https://docs.pytorch.org/docs/stable/torch.compiler_faq.html",
    ),
)

_MIN_FREE_STATE_RATIO = 1.05
"""Smallest ratio of memory to training state that leaves memory for activations."""

_SHARE_MORE = (
    ("zero2", "none"),
    ("zero3", "none"),
    ("zero2", "optimizer_cpu"),
    ("zero3", "optimizer_cpu"),
    ("zero3", "params_cpu"),
)
"""Options of `distributed` and `offload`, cheapest first."""


def copies(facts: RuleInputs) -> int:
    """Return the number of processes with their own copy in the device's memory (CPU only)."""
    return facts.distributed.num_processes if facts.on_cpu else 1


def per_process_bytes(facts: RuleInputs) -> StateBytes:
    """Return the bytes of state that one process keeps on its device."""
    return shared_state_bytes(facts.config, model_size(facts.config), facts.on_cpu)


def held_bytes(facts: RuleInputs) -> int:
    """Return the peak bytes of weights, gradients and optimizer state on one device."""
    return per_process_bytes(facts).peak * copies(facts)


def first_that_fits(facts: RuleInputs) -> Fix | None:
    """Return the first override with which the state fits into memory, else None."""
    memory = facts.device.memory_bytes or 0
    for fix, config in _smaller_states(facts):
        if held_bytes(replace(facts, config=config)) * _MIN_FREE_STATE_RATIO <= memory:
            return fix
    return None


def _smaller_states(facts: RuleInputs) -> Iterator[tuple[Fix, Config]]:
    """Yield smaller configurations: other sharding, another optimizer, fewer trained weights."""
    config, names = facts.config, ["peft=lora", "peft=qlora"]
    yield from _shared_otherwise(facts)
    if config.distributed.option in STAGE and config.precision.weights is Weights.bfloat16:
        names = []  # DeepSpeed would round the adapters
    if not isinstance(config.distributed, FSDP) and config.distributed.option not in STAGE:
        names = ["optimizer=adafactor", *names]  # its factors need full matrices
    for technique in map(TECHNIQUES.__getitem__, names):
        if changed := applied(config, [technique]):
            yield Fix(*technique.overrides, remark=technique.does), changed


def _shared_otherwise(facts: RuleInputs) -> Iterator[tuple[Fix, Config]]:
    """Yield configurations with fewer copies of the state or with sharded state."""
    config, sharing, count = facts.config, facts.distributed, facts.device.count
    for fewer in range(copies(facts) - 1, 0, -1):
        override = "distributed=none" if fewer == 1 else f"distributed.num_processes={fewer}"
        yield Fix(override), replace(config, distributed=replace(sharing, num_processes=fewer))
    for zero, offload in _SHARE_MORE if sharing.option in STAGE else ():
        zeroed = replace(sharing, option=zero)
        processes = f"distributed.num_processes={sharing.num_processes}"
        fix = Fix(f"distributed={zero}", processes, f"offload={offload}")
        yield fix, replace(config, distributed=zeroed, offload=Offload(option=offload))
    contradicts = config.batch.target and config.batch.target % (config.batch.micro_batch * count)
    several = facts.on_cuda and count > 1
    if several and not optimizer_entry(config.optimizer).fails_on_fsdp and not contradicts:
        fix = Fix("distributed=fsdp", f"distributed.num_processes={count}")
        yield fix, replace(config, distributed=FSDP("fsdp", count))
