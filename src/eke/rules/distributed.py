"""Rules about several processes."""

from eke.common.errors import Fix
from eke.config.schema import Config, Packing, PeerToPeer
from eke.hardware import usable_cores
from eke.models.sizes import STAGE, optimizer_entry
from eke.rules.rule import Facts, Rule, unsafe, without_effect

FSDP_DOCS = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
DP_DOCS = "https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html"
NCCL_DOCS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-p2p-disable"


def why_not_elastic(config: Config) -> str:
    """Why no other number of processes can go on from a checkpoint; empty if any can."""
    if config.distributed.option in STAGE and optimizer_entry(config.optimizer).quantises:
        return (
            f"optimizer = {config.optimizer.option} keeps states with a scale for each block of a "
            f"process's part, and another number of processes has other parts"
        )
    return ""


def _is_cut(facts: Facts) -> bool:
    """Whether FSDP2 shards every tensor."""
    sharing = facts.distributed
    return sharing.option == "fsdp" and sharing.num_processes > 1


def _replicas(facts: Facts) -> int:
    """The most copies, up to those asked for, that have equal parts, two or more."""
    processes = facts.distributed.num_processes
    most = min(getattr(facts.distributed, "replicas", 1), processes // 2)
    return max((n for n in range(1, most + 1) if processes % n == 0), default=1)


def _shared_evenly(facts: Facts) -> int:
    """The next number of processes that machines can share."""
    sharing = facts.distributed
    return sharing.processes_per_node * sharing.num_nodes


def _is_data_parallel(facts: Facts) -> bool:
    return facts.distributed.option == "dp"


def _usable_gpus(facts: Facts) -> int:
    return min(facts.distributed.num_processes, facts.device.count)


def _of_one(option: str, why: str, source: str) -> Rule:
    return without_effect(
        id=f"{option}_of_one",
        key="distributed",
        when=lambda f: f.distributed.option == option and f.distributed.num_processes == 1,
        why=why,
        fix=Fix("distributed=none"),
        source=source,
    )


RULES = (
    Rule(
        id="dp_needs_two_gpus",
        key="distributed",
        when=lambda f: _is_data_parallel(f) and (not f.on_cuda or _usable_gpus(f) < 2),
        why=lambda f: (
            "DataParallel splits rows over two GPUs or more; "
            + (
                f"this run would have {_usable_gpus(f)}"
                if f.on_cuda
                else f"on a CPU, {f.device.name}, PyTorch passes them through"
            )
        ),
        fix=lambda f: Fix("distributed=none" if f.on_cuda else "distributed=ddp"),
        source=DP_DOCS,
    ),
    Rule(
        id="dp_splits_rows",
        key="data.packing",
        when=lambda f: _is_data_parallel(f) and f.data.packing is Packing.padding_free,
        why="DataParallel gives each GPU some rows, and this micro-batch is one row",
        fix=Fix("distributed=ddp"),
        source=DP_DOCS,
    ),
    Rule(
        id="dp_is_not_compiled",
        key="compile",
        when=lambda f: _is_data_parallel(f) and f.config.compile.option != "none",
        why="DataParallel copies the module in each forward pass, so compiled code is of no use",
        fix=Fix("compile=none", remark="or: distributed=ddp"),
        source=DP_DOCS,
    ),
    Rule(
        id="one_process_without_strategy",
        key="distributed.num_processes",
        when=lambda f: f.distributed.option == "none" and f.distributed.num_processes > 1,
        why="distributed=none trains in one process",
        fix=lambda f: Fix(
            "distributed=ddp", remark=f"with num_processes={f.distributed.num_processes}"
        ),
        source="notes/ranks.md",
    ),
    _of_one("ddp", "a single process has no other to share work with", "arXiv:2006.15704"),
    _of_one("fsdp", "one process keeps all of every tensor", FSDP_DOCS),
    Rule(
        id="replicas_share_evenly",
        key="distributed.replicas",
        when=lambda f: getattr(f.distributed, "replicas", 1) != _replicas(f),
        why="processes hold each copy of the model in equal parts, two or more",
        fix=lambda f: Fix(f"distributed.replicas={_replicas(f)}"),
        source=FSDP_DOCS,
    ),
    Rule(
        id="fsdp_needs_elementwise_optimizer",
        key="optimizer",
        when=lambda f: _is_cut(f) and f.optimizer.fails_on_parts,
        why=lambda f: (
            "distributed=fsdp gives each process a part of every tensor; "
            + f.optimizer.fails_on_parts
        ),
        fix=Fix("optimizer=adamw", remark="or: distributed=ddp"),
        source="tests/unit/training/distributed/test_sharding.py: steps on sharded parameters",
        versions="torch 2.13, transformers 5.23, bitsandbytes 0.50",
    ),
    Rule(
        id="fsdp_keeps_its_activations",
        key="memory.activation_offload",
        when=lambda f: _is_cut(f) and f.config.memory.activation_offload,
        why="distributed=fsdp puts each layer's weights together for its forward pass, and they "
        "would be sent to the host as if they were activations",
        fix=Fix("memory.activation_offload=false"),
        source=FSDP_DOCS,
        versions="torch 2.13",
    ),
    without_effect(
        id="checkpoint_async_needs_parts",
        key="train.checkpoint_async",
        when=lambda f: (
            f.config.train.checkpoint_async is True
            and (f.distributed.option not in ("fsdp", *STAGE) or f.distributed.num_processes == 1)
        ),
        why="writes the parts of several processes, and one process writes this run's checkpoints",
        fix=Fix("train.checkpoint_async=null"),
        source="src/eke/training/loop/saving.py",
    ),
    without_effect(
        id="p2p_needs_gpus",
        key="distributed.p2p",
        when=lambda f: (
            f.distributed.p2p is PeerToPeer.off
            and (not f.on_cuda or f.distributed.processes_per_node < 2)
        ),
        why=lambda f: (
            "says how several GPUs exchange data; "
            + ("this run has one process" if f.on_cuda else f"{f.device.name} is a CPU")
        ),
        fix=Fix("distributed.p2p=auto"),
        source=NCCL_DOCS,
    ),
    unsafe(
        id="more_processes_than_cores",
        key="distributed.num_processes",
        when=lambda f: f.on_cpu and f.distributed.processes_per_node > usable_cores(),
        why=lambda f: (
            f"processes would share {usable_cores()} cores, and wait for each other in each step"
        ),
        fix=lambda f: Fix(f"distributed.num_processes={usable_cores() * f.distributed.num_nodes}"),
        source="a process computes on at least one core",
    ),
    Rule(
        id="more_processes_than_devices",
        key="distributed.num_processes",
        when=lambda f: (
            f.distributed.option != "none"
            and f.on_cuda
            and f.distributed.processes_per_node > f.device.count
        ),
        why=lambda f: (
            f"one process takes one device; there are {f.device.count}"
            + (" on each machine" if f.distributed.num_nodes > 1 else "")
        ),
        fix=lambda f: Fix(f"distributed.num_processes={f.device.count * f.distributed.num_nodes}"),
        source="src/eke/training/distributed/ranks.py",
    ),
    Rule(
        id="nodes_without_strategy",
        key="distributed.num_nodes",
        when=lambda f: f.distributed.num_nodes > 1 and f.distributed.option in ("none", "dp"),
        why=lambda f: f"distributed={f.distributed.option} trains in one process",
        fix=lambda f: Fix("distributed=ddp", f"distributed.num_processes={_shared_evenly(f)}"),
        source="notes/ranks.md",
    ),
    Rule(
        id="nodes_share_unevenly",
        key="distributed.num_nodes",
        when=lambda f: _shared_evenly(f) != f.distributed.num_processes,
        why=lambda f: (
            f"machines share the processes evenly, and {f.distributed.num_processes} is no multiple"
        ),
        fix=lambda f: Fix(f"distributed.num_processes={_shared_evenly(f)}"),
        source="src/eke/launch/processes/nodes.py",
    ),
    Rule(
        id="nodes_not_at_hand",
        key="distributed.num_nodes",
        when=lambda f: not f.planning and f.distributed.num_nodes > f.num_nodes,
        why="this command starts processes on one machine only",
        fix=Fix("distributed.num_nodes=1", remark="or: hydra/launcher=slurm"),
        source="docs/how-to/slurm.md",
    ),
)
