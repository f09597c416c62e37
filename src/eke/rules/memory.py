"""Rules about techniques against the memory of activations and gradients.

Whether the training state fits, by numbers, and what would make it fit: options tried in order.

A lower bound: activations come on top.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from eke.common.errors import Fix
from eke.config.schema import (
    FSDP,
    AdamW,
    Batch,
    Checkpointing,
    Compute,
    Config,
    Lora,
    Memory,
    Offload,
    Weights,
)
from eke.models.families import family_of
from eke.models.sizes import (
    STAGE,
    StateBytes,
    decide_formats,
    model_size,
    optimizer_entry,
    shared_state_bytes,
)
from eke.rules.precision import BF16_CAPABILITY
from eke.rules.rule import Facts, Rule, Severity, older_than
from eke.rules.techniques import TECHNIQUES

LOMO = "arXiv:2306.09782, section 3"
PARTITIONED = ("inductor", "aot_eager", "cudagraphs")
"""Compilers whose backward pass is one call, which returns all gradients together."""


def _memory(facts: Facts) -> Memory:
    return facts.config.memory


def _whole_backward(facts: Facts) -> bool:
    compiler = facts.config.compile
    whole = compiler.option in PARTITIONED and not compiler.regional
    return _memory(facts).optimizer_in_backward and whole


def _rotates_what_is_kept(facts: Facts) -> bool:
    """Liger's rotation overwrites the projections that selective checkpointing has kept.

    Not where heads are normalized in between; of an unknown architecture that is not known.
    """
    family = family_of(facts.config)
    return (
        facts.config.kernels.option == "liger"
        and _memory(facts).checkpointing is Checkpointing.selective
        and (family.has_liger or not family.is_known)
        and not family.norms_heads
    )


def accumulates(batch: Batch, num_processes: int) -> bool:
    """Whether a step has several micro-batches; of an open one, if it were of one sample."""
    if batch.target is not None:
        return batch.target > batch.micro_batch * num_processes
    return (batch.accumulation or 1) > 1


def _one_micro_batch(facts: Facts) -> Fix:
    batch = facts.config.batch
    fixes = ["batch.accumulation=1"] if batch.accumulation is not None else []
    fixes += ["batch.target=null"] if batch.target is not None else []
    return Fix(*fixes)


def _without_scaling(facts: Facts) -> Fix:
    new_enough = not older_than(facts, BF16_CAPABILITY)
    if facts.config.precision.option == "fp16":
        return Fix("precision=bf16") if new_enough else Fix("precision=fp32")
    return Fix(f"precision.compute={'bfloat16' if new_enough else 'float32'}")


def _one_process(facts: Facts) -> Fix:
    if facts.config.offload.option != "none":  # which needs the processes
        return Fix("memory.optimizer_in_backward=false")
    distributed = facts.config.distributed
    several = ("distributed.num_processes=1",) if distributed.num_processes > 1 else ()
    return Fix("distributed=none", *several)


RULES = (
    Rule(
        id="every_n_needs_checkpointing",
        verdict=Severity.no_effect,
        key="memory.every_n",
        when=lambda f: _memory(f).every_n > 1 and _memory(f).checkpointing is Checkpointing.off,
        value=lambda f: _memory(f).every_n,
        why=lambda f: "no layer is recomputed, memory.checkpointing = off",
        fix=lambda f: Fix("memory.checkpointing=full"),
        source="arXiv:1604.06174",
    ),
    Rule(
        id="selective_is_written_over",
        verdict=Severity.impossible,
        key="memory.checkpointing",
        when=_rotates_what_is_kept,
        value=lambda f: _memory(f).checkpointing.value,
        why=lambda f: (
            "kernels=liger rotates queries and keys in place, where their projections are kept for "
            "the backward pass: it would rotate them twice, and gradients would be wrong"
        ),
        fix=lambda f: Fix("memory.checkpointing=full"),
        source="liger_kernel/ops/rope.py, rope_forward: contiguous() copies nothing here",
        versions="liger-kernel 0.8.5",
    ),
    Rule(
        id="offload_needs_gpu",
        verdict=Severity.no_effect,
        key="memory.activation_offload",
        when=lambda f: _memory(f).activation_offload and f.device.kind == "cpu",
        value=lambda f: _memory(f).activation_offload,
        why=lambda f: f"{f.device.name} is a CPU: activations are in host memory already",
        fix=lambda f: Fix("memory.activation_offload=false"),
        source="https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.save_on_cpu",
    ),
    Rule(
        id="empty_cache_needs_gpu",
        verdict=Severity.no_effect,
        key="memory.empty_cache_every",
        when=lambda f: _memory(f).empty_cache_every is not None and f.device.kind == "cpu",
        value=lambda f: _memory(f).empty_cache_every,
        why=lambda f: f"{f.device.name} is a CPU, whose freed blocks PyTorch does not keep",
        fix=lambda f: Fix("memory.empty_cache_every=null"),
        source="https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.empty_cache.html",
    ),
    Rule(
        id="in_backward_cannot_clip",
        verdict=Severity.impossible,
        key="train.max_grad_norm",
        when=lambda f: (
            _memory(f).optimizer_in_backward and f.config.train.max_grad_norm is not None
        ),
        value=lambda f: f.config.train.max_grad_norm,
        why=lambda f: (
            "the norm of all gradients is known when the last one is there; with "
            "memory.optimizer_in_backward the first ones have been used by then"
        ),
        fix=lambda f: Fix("train.max_grad_norm=null"),
        source=LOMO,
    ),
    Rule(
        id="in_backward_cannot_accumulate",
        verdict=Severity.impossible,
        key="memory.optimizer_in_backward",
        when=lambda f: (
            _memory(f).optimizer_in_backward
            and accumulates(f.config.batch, f.config.distributed.num_processes)
        ),
        value=lambda f: _memory(f).optimizer_in_backward,
        why=lambda f: "a gradient that is used and freed at once cannot be added to the next one's",
        fix=_one_micro_batch,
        source=LOMO,
    ),
    Rule(
        id="in_backward_cannot_scale",
        verdict=Severity.impossible,
        key="memory.optimizer_in_backward",
        when=lambda f: (
            _memory(f).optimizer_in_backward and f.config.precision.compute is Compute.float16
        ),
        value=lambda f: _memory(f).optimizer_in_backward,
        why=lambda f: (
            "float16 scales the loss and skips a step whose gradients overflow, which is known "
            "when the last one is there"
        ),
        fix=_without_scaling,
        source="https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling",
    ),
    Rule(
        id="in_backward_without_copies",
        verdict=Severity.impossible,
        key="memory.optimizer_in_backward",
        when=lambda f: _memory(f).optimizer_in_backward and decide_formats(f.config).master,
        value=lambda f: _memory(f).optimizer_in_backward,
        why=lambda f: (
            "precision.master=on steps on float32 copies of all weights at once, after the "
            "backward pass"
        ),
        fix=lambda f: Fix("precision.master=off"),
        source=LOMO,
    ),
    Rule(
        id="in_backward_is_one_process",
        verdict=Severity.impossible,
        key="memory.optimizer_in_backward",
        when=lambda f: (
            _memory(f).optimizer_in_backward
            and (
                f.config.distributed.num_processes > 1
                or f.config.distributed.option not in ("none", "ddp")
            )
        ),
        value=lambda f: _memory(f).optimizer_in_backward,
        why=lambda f: (
            f"distributed={f.config.distributed.option} exchanges gradients in buckets after the "
            "weights' own hooks have run"
        ),
        fix=_one_process,
        source="arXiv:2006.15704, section 3.2",
    ),
    Rule(
        id="in_backward_needs_other_optimizer",
        verdict=Severity.impossible,
        key="memory.optimizer_in_backward",
        when=lambda f: (
            _memory(f).optimizer_in_backward
            and optimizer_entry(f.config.optimizer).fails_in_backward != ""
        ),
        value=lambda f: _memory(f).optimizer_in_backward,
        why=lambda f: (
            f"optimizer={f.config.optimizer.option} "
            f"{optimizer_entry(f.config.optimizer).fails_in_backward}"
        ),
        fix=lambda f: Fix("optimizer=adamw"),
        source="tests/equivalence/test_in_backward.py",
    ),
    Rule(
        id="in_backward_needs_parts",
        verdict=Severity.no_effect,
        key="memory.optimizer_in_backward",
        when=_whole_backward,
        value=lambda f: _memory(f).optimizer_in_backward,
        why=lambda f: (
            f"compile={f.config.compile.option} makes one call of the backward pass, which returns "
            "all gradients together"
        ),
        fix=lambda f: Fix("compile.regional=true"),
        source="https://docs.pytorch.org/docs/stable/torch.compiler_faq.html",
    ),
)


ROOM = 1.05
"""Share of the state that is left for activations, at least: nothing trains on the last byte."""

SHARE_MORE = (
    ("zero2", "none"),
    ("zero3", "none"),
    ("zero2", "optimizer_cpu"),
    ("zero3", "optimizer_cpu"),
    ("zero3", "params_cpu"),
)
"""Options of `distributed` and `offload`, mildest first."""

Change = tuple[Fix, Config]
"""Overrides, and the configuration with them."""


def copies(facts: Facts) -> int:
    """Processes that share the device's memory, each with a copy: a CPU's."""
    return facts.config.distributed.num_processes if facts.device.kind == "cpu" else 1


def in_one(facts: Facts) -> StateBytes:
    """Memory that one process keeps on its device; a CPU's is the host's."""
    return shared_state_bytes(facts.config, model_size(facts.config), facts.device.kind == "cpu")


def held_bytes(facts: Facts) -> int:
    """The most that weights, gradients and optimizer state take of one device's memory."""
    return in_one(facts).peak * copies(facts)


def first_that_fits(facts: Facts) -> Fix | None:
    """The override with which the state fits into the memory; None where none of them does."""
    memory = facts.device.memory_bytes or 0
    for changes in SAVERS:
        for fix, config in changes(facts):
            if held_bytes(replace(facts, config=config)) * ROOM <= memory:
                return fix
    return None


def _fewer_processes(facts: Facts) -> Iterator[Change]:
    config = facts.config
    for count in range(copies(facts) - 1, 0, -1):
        fewer = replace(config.distributed, num_processes=count)
        override = "distributed=none" if count == 1 else f"distributed.num_processes={count}"
        yield Fix(override), replace(config, distributed=fewer)


def _adafactor(facts: Facts) -> Iterator[Change]:
    """Not where the state is cut: Adafactor's factors are those of whole matrices."""
    config = facts.config
    cut = isinstance(config.distributed, FSDP) or config.distributed.option in STAGE
    if isinstance(config.optimizer, AdamW) and not cut:
        yield Fix("optimizer=adafactor"), TECHNIQUES["optimizer=adafactor"].apply(config)


def _all_gpus(facts: Facts) -> Iterator[Change]:
    config, count = facts.config, facts.device.count
    contradicts = config.batch.target and config.batch.target % (config.batch.micro_batch * count)
    several = facts.device.kind == "cuda" and count > 1
    if several and not optimizer_entry(config.optimizer).fails_on_parts and not contradicts:
        shared = replace(config, distributed=FSDP("fsdp", count))
        yield Fix("distributed=fsdp", f"distributed.num_processes={count}"), shared


def _more_sharing(facts: Facts) -> Iterator[Change]:
    config = facts.config
    if config.distributed.option not in STAGE:
        return
    for zero, offload in SHARE_MORE:
        changed = replace(
            config,
            distributed=replace(config.distributed, option=zero),
            offload=Offload(option=offload),
        )
        processes = f"distributed.num_processes={config.distributed.num_processes}"
        yield Fix(f"distributed={zero}", processes, f"offload={offload}"), changed


def _adapters(facts: Facts) -> Iterator[Change]:
    """Not where DeepSpeed would round the adapters, too."""
    config = facts.config
    if config.distributed.option in STAGE and config.precision.weights is Weights.bfloat16:
        return
    lora = TECHNIQUES["peft=lora"].apply(config)
    if config.peft.option == "none":
        yield Fix("peft=lora", remark="trains adapters, the weights are frozen"), lora
    if config.peft.option != "qlora":
        adapted = config if isinstance(config.peft, Lora) else lora
        qlora = TECHNIQUES["peft=qlora"].apply(adapted)
        remark = "trains adapters, the weights are frozen and kept in 4 bits"
        yield Fix("peft=qlora", remark=remark), qlora


SAVERS: tuple[Callable[[Facts], Iterator[Change]], ...] = (
    _fewer_processes,
    _more_sharing,
    _all_gpus,
    _adafactor,
    _adapters,
)
"""Cheapest change first: the same training, then another optimizer, then fewer weights trained."""
