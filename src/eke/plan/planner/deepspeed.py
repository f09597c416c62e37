"""DeepSpeed's configuration, from eke's: a pure function, so that it can be read and tested.

Precision and the loss stay eke's own (autocast around the model, a loss that is summed over ranks);
DeepSpeed shares out, clips and steps. Its `bf16` is what eke calls bfloat16 weights. Sizes that
Hugging Face's `auto` stands for are computed as transformers does (`HfTrainerDeepSpeedConfig`,
transformers 5.23).
"""

from typing import Any

from eke.common.paths import user_path
from eke.config.schema import Config, NvmeOffload, Weights, WeightsPlace
from eke.models.sizes import PIECE_BUFFERS, WEIGHT_BUFFERS, largest_part
from eke.plan.planner.plan import BatchPlan

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

WEIGHTS = {WeightsPlace.device: None, WeightsPlace.host: "cpu", WeightsPlace.disk: "nvme"}
"""`offload.weights` -> DeepSpeed's `offload_param.device`; None leaves the section out."""


def deepspeed_settings(config: Config, batch: BatchPlan, device_kind: str) -> Settings:
    """What DeepSpeed is told; nothing is left to its defaults that changes memory or mathematics.

    Args:
        config: with `distributed` one of STAGES.
        batch: how a step is cut.
        device_kind: `cpu` or `cuda`; page-locked host memory needs a GPU.
    """
    settings = {
        "train_batch_size": batch.samples_per_step,
        "train_micro_batch_size_per_gpu": batch.per_device,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": config.train.max_grad_norm or 0.0,
        "zero_optimization": _zero(config, device_kind),
        "fp16": {"enabled": False},
        "bf16": {"enabled": config.precision.weights is Weights.bfloat16},
        # eke's rules say which optimizers work; DeepSpeed's own list is shorter.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if isinstance(config.offload, NvmeOffload):
        settings["aio"] = _transfers(config.offload)
    return settings


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
    if isinstance(config.offload, NvmeOffload):
        zero["sub_group_size"] = config.offload.piece_numbers
    return zero | _offload(config, device_kind)


def _offload(config: Config, device_kind: str) -> Settings:
    """The sections `offload_optimizer` and `offload_param`, as far as they are wanted.

    DeepSpeed's `pipeline_read` and `pipeline_write` are left off: they need twice the buffers.
    """
    offload = config.offload
    pinned = {"pin_memory": device_kind == "cuda"}
    if not isinstance(offload, NvmeOffload):
        places = OFFLOADED[offload.option]
        return {what: {"device": where, **pinned} for what, where in places.items()}
    disk = {"device": "nvme", "nvme_path": str(user_path(offload.path)), **pinned}
    sections: Settings = {"offload_optimizer": {**disk, "buffer_count": PIECE_BUFFERS}}
    where = WEIGHTS[offload.weights]
    if where == "cpu":
        sections["offload_param"] = {"device": where, **pinned}
    if where == "nvme":
        sections["offload_param"] = {
            **disk,
            "buffer_count": WEIGHT_BUFFERS,
            "buffer_size": largest_part(config),
            "max_in_cpu": 0,  # DeepSpeed's default keeps the first 1e9 weights in host memory
        }
    return sections


def _transfers(offload: NvmeOffload) -> Settings:
    """The section `aio` in full, since its defaults are the disk's speed."""
    return {
        "block_size": offload.block_bytes,
        "queue_depth": offload.queue_depth,
        "intra_op_parallelism": offload.threads,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
    }
