"""Rules about several processes."""

from eke.common.errors import Fix
from eke.config.schema import Config, Packing
from eke.hardware import usable_cores
from eke.models.sizes import STAGE, optimizer_entry
from eke.rules.rule import Rule, RuleInputs, unsafe, without_effect

_FSDP_DOCS = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
_DP_DOCS = "https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html"
_NCCL_DOCS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-p2p-disable"


def why_not_elastic(config: Config) -> str:
    """Return why a checkpoint needs the same number of processes, or "" if it does not."""
    if config.distributed.option in STAGE and optimizer_entry(config.optimizer).quantises:
        return (
            f"optimizer = {config.optimizer.option} has a scale per block of a shard, and shards "
            "depend on the number of processes"
        )
    return ""


def _is_cut(facts: RuleInputs) -> bool:
    """Return whether FSDP2 shards the tensors."""
    sharing = facts.distributed
    return sharing.option == "fsdp" and sharing.num_processes > 1


def _replicas(facts: RuleInputs) -> int:
    """Return the largest valid number of replicas up to the configured one."""
    processes = facts.distributed.num_processes
    most = min(getattr(facts.distributed, "replicas", 1), processes // 2)
    return max((n for n in range(1, most + 1) if processes % n == 0), default=1)


def _shared_evenly(facts: RuleInputs) -> int:
    """Return the next number of processes that is a multiple of the nodes."""
    sharing = facts.distributed
    return sharing.processes_per_node * sharing.num_nodes


def _usable_gpus(facts: RuleInputs) -> int:
    return min(facts.distributed.num_processes, facts.device.count)


def _of_one(option: str, why: str, source: str) -> Rule:
    return without_effect(
        key="distributed",
        when=lambda f: f.distributed.option == option and f.distributed.num_processes == 1,
        why=why,
        source=source,
    )


RULES = dict(
    dp_needs_two_gpus=Rule(
        key="distributed",
        when=lambda f: f.config.ranks.is_dp and (not f.on_cuda or _usable_gpus(f) < 2),
        why=lambda f: (
            "DataParallel needs two GPUs or more. "
            + (f"This run has {_usable_gpus(f)}" if f.on_cuda else f"{f.device.name} is a CPU")
        ),
        fix=lambda f: Fix("distributed=none" if f.on_cuda else "distributed=ddp"),
        source=_DP_DOCS,
    ),
    dp_splits_rows=Rule(
        key="data.packing",
        when=lambda f: f.config.ranks.is_dp and f.data.packing is Packing.padding_free,
        why="DataParallel splits the rows of a micro-batch. This one has a single row",
        fix=Fix("distributed=ddp"),
        source=_DP_DOCS,
    ),
    dp_is_not_compiled=Rule(
        key="compile",
        when=lambda f: f.config.ranks.is_dp and f.config.compile.option != "none",
        why="DataParallel copies the module in each forward pass, which discards compiled code",
        fix=Fix("compile=none", remark="or: distributed=ddp"),
        source=_DP_DOCS,
    ),
    one_process_without_strategy=Rule(
        key="distributed.num_processes",
        when=lambda f: f.distributed.option == "none" and f.distributed.num_processes > 1,
        why="distributed=none trains in one process",
        fix=lambda f: Fix(
            "distributed=ddp", remark=f"with num_processes={f.distributed.num_processes}"
        ),
        source="notes/ranks.md",
    ),
    ddp_of_one=_of_one("ddp", "one process has no gradients to exchange", "arXiv:2006.15704"),
    fsdp_of_one=_of_one("fsdp", "one process has nothing to shard", _FSDP_DOCS),
    replicas_share_evenly=Rule(
        key="distributed.replicas",
        when=lambda f: getattr(f.distributed, "replicas", 1) != _replicas(f),
        why="must divide the processes into equal groups of two or more",
        fix=lambda f: Fix(f"distributed.replicas={_replicas(f)}"),
        source=_FSDP_DOCS,
    ),
    fsdp_needs_elementwise_optimizer=Rule(
        key="optimizer",
        when=lambda f: _is_cut(f) and f.optimizer.fails_on_fsdp,
        why=lambda f: f"distributed=fsdp shards every tensor: {f.optimizer.fails_on_fsdp}",
        fix=Fix("optimizer=adamw", remark="or: distributed=ddp"),
        source="tests/unit/training/distributed/test_sharding.py: steps on sharded parameters",
        versions="torch 2.13, transformers 5.23, bitsandbytes 0.50",
    ),
    fsdp_keeps_its_activations=Rule(
        key="memory.activation_offload",
        when=lambda f: _is_cut(f) and f.config.memory.activation_offload,
        why="distributed=fsdp would offload each layer's gathered weights as activations",
        source=_FSDP_DOCS,
        versions="torch 2.13",
    ),
    checkpoint_async_needs_parts=without_effect(
        key="train.checkpoint_async",
        when=lambda f: (
            f.config.train.checkpoint_async is True
            and (f.distributed.option not in ("fsdp", *STAGE) or f.distributed.num_processes == 1)
        ),
        why="needs sharded training. One process writes the checkpoints of this run",
        source="src/eke/training/loop/saving.py",
    ),
    p2p_needs_gpus=without_effect(
        key="distributed.p2p",
        when=lambda f: not f.on_cuda or f.distributed.processes_per_node < 2,
        why=lambda f: (
            "is about data exchange between GPUs. "
            + ("This run has one process" if f.on_cuda else f"{f.device.name} is a CPU")
        ),
        source=_NCCL_DOCS,
    ),
    more_processes_than_cores=unsafe(
        key="distributed.num_processes",
        when=lambda f: f.on_cpu and f.distributed.processes_per_node > usable_cores(),
        why=lambda f: f"more processes than the {usable_cores()} available cores",
        fix=lambda f: Fix(f"distributed.num_processes={usable_cores() * f.distributed.num_nodes}"),
        source="a process computes on at least one core",
    ),
    more_processes_than_devices=Rule(
        key="distributed.num_processes",
        when=lambda f: (
            f.distributed.option != "none"
            and f.on_cuda
            and f.distributed.processes_per_node > f.device.count
        ),
        why=lambda f: (
            f"each process needs its own device. Available: {f.device.count}"
            + (" per node" if f.distributed.num_nodes > 1 else "")
        ),
        fix=lambda f: Fix(f"distributed.num_processes={f.device.count * f.distributed.num_nodes}"),
        source="src/eke/training/distributed/ranks.py",
    ),
    nodes_without_strategy=Rule(
        key="distributed.num_nodes",
        when=lambda f: f.distributed.num_nodes > 1 and f.distributed.option in ("none", "dp"),
        why=lambda f: f"distributed={f.distributed.option} trains in one process",
        fix=lambda f: Fix("distributed=ddp", f"distributed.num_processes={_shared_evenly(f)}"),
        source="notes/ranks.md",
    ),
    nodes_share_unevenly=Rule(
        key="distributed.num_nodes",
        when=lambda f: _shared_evenly(f) != f.distributed.num_processes,
        why=lambda f: f"is not a multiple of distributed.num_nodes = {f.distributed.num_nodes}",
        fix=lambda f: Fix(f"distributed.num_processes={_shared_evenly(f)}"),
        source="src/eke/launch/processes/multi_node.py",
    ),
    nodes_not_at_hand=Rule(
        key="distributed.num_nodes",
        when=lambda f: not f.planning and f.distributed.num_nodes > f.num_nodes,
        why="this command starts processes only on this machine",
        fix=Fix("distributed.num_nodes=1", remark="or: hydra/launcher=slurm"),
        source="docs/how-to/slurm.md",
    ),
)
