"""Cases of rules/memory.py: the command and the device that break each rule."""

from unit.rules.devices import CPU, H200

from eke.hardware import Device

IN_BACKWARD = ("memory=optimizer_in_backward", "train.max_grad_norm=null")

CASES: dict[str, tuple[tuple[str, ...], Device]] = {
    "in_backward_without_copies": (
        (
            "memory=optimizer_in_backward",
            "train.max_grad_norm=null",
            "precision=bf16_pure",
            "precision.master=on",
        ),
        CPU,
    ),
    "every_n_needs_checkpointing": (("memory.every_n=2",), CPU),
    "selective_is_written_over": (("kernels=liger", "memory=checkpointing_selective"), H200),
    "offload_needs_gpu": (("memory=activation_offload",), CPU),
    "empty_cache_needs_gpu": (("memory=empty_cache",), CPU),
    "in_backward_cannot_clip": (("memory=optimizer_in_backward",), CPU),
    "in_backward_cannot_accumulate": ((*IN_BACKWARD, "batch.accumulation=2"), CPU),
    "in_backward_cannot_scale": ((*IN_BACKWARD, "precision=fp16"), CPU),
    "in_backward_is_one_process": (
        (*IN_BACKWARD, "distributed=ddp", "distributed.num_processes=2"),
        CPU,
    ),
    "in_backward_needs_other_optimizer": ((*IN_BACKWARD, "optimizer=schedule_free"), CPU),
    "in_backward_needs_parts": ((*IN_BACKWARD, "compile=inductor"), H200),
}

FIX_IS_WORDS: set[str] = set()
"""Rules whose fix is no override that a test can type."""
