"""DeepSpeed's configuration, from eke's: a pure function, so that it can be read and tested.

Precision and the loss stay eke's own (autocast around the model, float32 weights, a loss that is
summed over ranks); DeepSpeed shares out, clips and steps. Sizes that Hugging Face's `auto` stands
for are computed as transformers does (`HfTrainerDeepSpeedConfig`, transformers 5.23).
"""

from typing import Any

from eke.plan.plan import BatchPlan
from eke.schema import Config

Settings = dict[str, Any]
"""Content of a ds_config.json."""

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
"""Option of the group `distributed` -> DeepSpeed's `zero_optimization.stage`."""

OFFLOADED: dict[str, dict[str, str]] = {
    "none": {},
    "optimizer_cpu": {"offload_optimizer": "cpu"},
    "params_cpu": {"offload_optimizer": "cpu", "offload_param": "cpu"},
}
"""Option of the group `offload` -> what DeepSpeed keeps where."""


def deepspeed_settings(config: Config, batch: BatchPlan, device_kind: str) -> Settings:
    """What DeepSpeed is told; nothing is left to its defaults that changes memory or mathematics.

    Args:
        config: with `distributed` one of STAGES.
        batch: how a step is cut.
        device_kind: `cpu` or `cuda`; page-locked host memory needs a GPU.
    """
    return {
        "train_batch_size": batch.samples_per_step,
        "train_micro_batch_size_per_gpu": batch.per_device,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": config.train.max_grad_norm or 0.0,
        "zero_optimization": _zero(config, device_kind),
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        # eke's rules say which optimizers work; DeepSpeed's own list is shorter.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _zero(config: Config, device_kind: str) -> Settings:
    """The section `zero_optimization`."""
    stage = STAGES[config.distributed.option]
    width = config.model.hidden_size
    zero: Settings = {
        "stage": stage,
        "overlap_comm": device_kind == "cuda",  # a second CUDA stream; a CPU has none
        "reduce_bucket_size": width * width,
    }
    if stage == STAGES["zero3"]:
        zero["stage3_prefetch_bucket_size"] = width * width * 9 // 10
        zero["stage3_param_persistence_threshold"] = 10 * width
    else:
        zero["allgather_bucket_size"] = width * width
    for what, where in OFFLOADED[config.offload.option].items():
        zero[what] = {"device": where, "pin_memory": device_kind == "cuda"}
    return zero
