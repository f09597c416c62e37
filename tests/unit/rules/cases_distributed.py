"""Cases of rules/distributed.py: the command and the device that break each rule."""

import dataclasses

from unit.rules.devices import CPU, H200, V100

from eke.hardware import Device

TWO_GPUS = dataclasses.replace(H200, count=2)

FSDP = ("distributed=fsdp", "distributed.num_processes=2")

CASES: dict[str, tuple[tuple[str, ...], Device]] = {
    "fsdp_keeps_its_activations": ((*FSDP, "memory=activation_offload"), CPU),
    "one_process_without_strategy": (("distributed.num_processes=2",), CPU),
    "ddp_of_one": (("distributed=ddp", "distributed.num_processes=1"), CPU),
    "dp_needs_two_gpus": (("distributed=dp",), CPU),
    "dp_splits_rows": (
        ("distributed=dp", "data=synthetic", "data.lengths=uniform", "data.packing=padding_free"),
        TWO_GPUS,
    ),
    "dp_is_not_compiled": (("distributed=dp", "compile=inductor"), TWO_GPUS),
    "fsdp_of_one": (("distributed=fsdp", "distributed.num_processes=1"), CPU),
    "fsdp_needs_elementwise_optimizer": (("distributed=fsdp", "optimizer=adafactor"), CPU),
    "p2p_needs_gpus": (("distributed=ddp", "distributed.p2p=off"), CPU),
    "more_processes_than_cores": (("distributed=ddp", "distributed.num_processes=512"), CPU),
    "more_processes_than_devices": (("distributed=ddp", "distributed.num_processes=512"), V100),
    "nodes_without_strategy": (("distributed.num_nodes=2",), CPU),
    "nodes_share_unevenly": (
        ("distributed=ddp", "distributed.num_processes=3", "distributed.num_nodes=2"),
        CPU,
    ),
    "nodes_not_at_hand": (("distributed=ddp", "distributed.num_nodes=2"), CPU),
}

FIX_IS_WORDS: set[str] = set()
"""Rules whose fix is no override that a test can type."""
