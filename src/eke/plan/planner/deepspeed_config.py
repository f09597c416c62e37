"""DeepSpeed's configuration, from eke's: a pure function, so that it can be read and tested.

Precision and the loss stay eke's own (autocast around the model, a loss that is summed over ranks);
DeepSpeed shares out, clips and steps. Its `bf16` is what eke calls bfloat16 weights. Sizes that
Hugging Face's `auto` stands for are computed as transformers does (`HfTrainerDeepSpeedConfig`,
transformers 5.23).
"""

import json
from collections.abc import Callable
from math import prod
from typing import Any

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.paths import user_path
from eke.common.text import format_value, override
from eke.config.schema import Config, NvmeOffload, Weights, WeightsPlace
from eke.models.sizes import PIECE_BUFFERS, STAGE, training_structure
from eke.plan.planner.plan import BatchPlan

Settings = dict[str, Any]
"""Content of a ds_config.json."""

OFFLOADED: dict[str, dict[str, str]] = {
    "none": {},
    "optimizer_cpu": {"offload_optimizer": "cpu"},
    "params_cpu": {"offload_optimizer": "cpu", "offload_param": "cpu"},
}
"""Option of the group `offload` -> what DeepSpeed keeps where."""


def deepspeed_settings(config: Config, batch: BatchPlan, device_kind: str) -> Settings:
    """DeepSpeed's configuration; every default that changes memory or mathematics is set.

    `distributed` is one of STAGE; `device_kind` is `cpu` or `cuda`, which page-locked memory needs.
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
        settings["aio"] = {  # in full, since its defaults are the disk's speed
            "block_size": config.offload.block_bytes,
            "queue_depth": config.offload.queue_depth,
            "intra_op_parallelism": config.offload.threads,
            "single_submit": False,
            "overlap_events": True,
            "use_gds": False,
        }
    return settings


def _zero(config: Config, device_kind: str) -> Settings:
    """The section `zero_optimization`."""
    stage, width = STAGE[config.distributed.option], config.model.hidden_size
    zero: Settings = {
        "stage": stage,
        "overlap_comm": device_kind == "cuda",  # a second CUDA stream; a CPU has none
        "reduce_bucket_size": width * width,
    }
    if stage == STAGE["zero3"]:
        zero["stage3_prefetch_bucket_size"] = width * width * 9 // 10
        zero["stage3_param_persistence_threshold"] = 10 * width
    else:
        zero["allgather_bucket_size"] = width * width
    if isinstance(config.offload, NvmeOffload):
        zero["sub_group_size"] = config.offload.piece_numbers
    return zero | _offload_settings(config, device_kind)


def _offload_settings(config: Config, device_kind: str) -> Settings:
    """The sections `offload_optimizer` and `offload_param`, where configured."""
    offload = config.offload
    pinned = {"pin_memory": device_kind == "cuda"}
    if not isinstance(offload, NvmeOffload):
        places = OFFLOADED[offload.option]
        return {what: {"device": where, **pinned} for what, where in places.items()}
    disk = {"device": "nvme", "nvme_path": str(user_path(offload.path)), **pinned}
    # `pipeline_read` and `pipeline_write` are left off: they need twice the buffers.
    sections: Settings = {"offload_optimizer": {**disk, "buffer_count": PIECE_BUFFERS}}
    if offload.weights is WeightsPlace.host:
        sections["offload_param"] = {"device": "cpu", **pinned}
    if offload.weights is WeightsPlace.disk:  # which a rule refuses
        weights, processes = training_structure(config).weights, config.distributed.num_processes
        sections["offload_param"] = {
            **disk,
            "buffer_count": 5,  # DeepSpeed's default
            "buffer_size": max(-(-prod(w.shape) // processes) for w in weights),
            "max_in_cpu": 0,  # DeepSpeed's default keeps the first 1e9 weights in host memory
        }
    return sections


KEY = "distributed.deepspeed_config"
AUTO = "auto"

OWNED: dict[str, Callable[[Any], str]] = {
    "train_batch_size": lambda value: f"batch.target={value}",
    "train_micro_batch_size_per_gpu": lambda value: f"batch.per_device={value}",
    "gradient_accumulation_steps": lambda value: f"batch.accumulation={value}",
    "gradient_clipping": lambda value: f"train.max_grad_norm={value or 'null'}",
    "zero_optimization.stage": lambda value: f"distributed={f'zero{value}' if value else 'ddp'}",
    "zero_optimization.offload_optimizer.device": lambda value: _offload(value, "optimizer_cpu"),
    "zero_optimization.offload_param.device": lambda value: _offload(value, "params_cpu"),
    "fp16.enabled": lambda value: f"precision={'fp16' if value else 'fp32'}",
    "bf16.enabled": lambda value: f"precision={'bf16_pure' if value else 'fp32'}",
}
"""What the plan decides -> the override that says the same as the file."""

OWNED_ON_DISK: dict[str, Callable[[Any], str]] = {
    "zero_optimization.offload_optimizer.nvme_path": lambda value: f"offload.path={value}",
    "zero_optimization.offload_param.nvme_path": lambda value: f"offload.path={value}",
    "zero_optimization.sub_group_size": lambda value: f"offload.piece_numbers={value:.0f}",
    "aio.block_size": lambda value: f"offload.block_bytes={value}",
    "aio.queue_depth": lambda value: f"offload.queue_depth={value}",
    "aio.intra_op_parallelism": lambda value: f"offload.threads={value}",
}
"""The same keys with `offload=nvme`; unused without it."""

OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "lion": "lion", "muon": "muon"}
"""DeepSpeed's name of an optimizer -> eke's options begin with."""

SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
"""DeepSpeed's name of a schedule -> eke's."""

SAME = ("lr", "eps", "weight_decay", "momentum")
PARAMS: dict[str, tuple[str, ...]] = {"betas": ("beta1", "beta2")} | {key: (key,) for key in SAME}
"""Key of `optimizer.params` -> fields of the group `optimizer`."""

KNOWN = {
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16", "checkpoint",
    "comms_logger", "communication_data_type", "compile", "compression_training", "csv_monitor",
    "curriculum_learning", "data_efficiency", "data_types", "disable_allgather", "dump_state",
    "elasticity", "flops_profiler", "fp16", "gradient_predivide_factor", "memory_breakdown",
    "optimizer", "prescale_gradients", "scheduler", "seq_parallel_communication_data_type",
    "sparse_attention", "sparse_gradients", "steps_per_print", "tensorboard", "timers",
    "torch_autocast", "wall_clock_breakdown", "wandb", "zero_optimization",
}  # fmt: skip
"""Further keys that DeepSpeed 0.19 reads (https://www.deepspeed.ai/docs/config-json)."""

FORBIDDEN = {
    "torch_autocast": "eke's own autocast surrounds the model",
    "amp": "apex's mixed precision would come on top of eke's",
    "data_types": "formats of gradients are eke's to choose",
    "bfloat16": "is bf16's old name",
    "sparse_gradients": "the gradient norm would be another one",
    "compression_training": "it changes the model while it trains",
    "curriculum_learning": "the order of samples is eke's",
    "data_efficiency": "the order of samples is eke's",
    "elasticity": "the number of samples in a step is eke's",
    "prescale_gradients": "the loss is divided already",
    "gradient_predivide_factor": "the loss is divided already",
}
"""Sections that would change the mathematics behind the plan's back -> why."""


def read_user_settings(config: Config) -> Settings | None:
    """The content of the user's file, if any, or a ConfigError: it is no readable JSON object."""
    name = config.distributed.deepspeed_config
    if name is None:
        return None
    why = "holds no JSON object"
    try:
        content = json.loads(user_path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        content, why = None, f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if not isinstance(content, dict):
        raise ConfigError(Problem(KEY, name, why, Fix(f"{KEY}=null")))
    return content


def merge_user_settings(
    config: Config, mine: Settings, theirs: Settings
) -> tuple[Settings, list[str]]:
    """Settings of eke with the user's laid over them, and what the user should know.

    `auto` takes eke's value. The sections `optimizer` and `scheduler` are compared with the plan
    and skipped: eke sets both.

    Raises ConfigError: every contradiction, with both values and the override that ends it.
    """
    name = str(config.distributed.deepspeed_config)
    problems = [
        Problem(KEY, name, f"has {key}, and {why}", Fix(remark=f"remove {key} from {name}"))
        for key, why in FORBIDDEN.items()
        if key in theirs and not _is_off(theirs[key])
    ]
    problems += _other_optimizer(config, theirs.get("optimizer"))
    problems += _other_schedule(config, theirs.get("scheduler"))
    rest = {k: v for k, v in theirs.items() if k not in ("optimizer", "scheduler", *FORBIDDEN)}
    merged = _lay_over(mine, rest, "", name, problems)
    if problems:
        raise ConfigError(problems)
    unknown = sorted(set(rest) - KNOWN - set(mine))
    return merged, [f"{KEY} = {name}: DeepSpeed knows no key {key}" for key in unknown]


def _lay_over(
    mine: Settings, theirs: Settings, prefix: str, name: str, problems: list[Problem]
) -> Settings:
    """Nested dictionaries merged; their values win where the plan does not own the key."""
    merged = dict(mine)
    for key, value in theirs.items():
        path = f"{prefix}{key}"
        ours = mine.get(key)
        if isinstance(value, dict):
            base = ours if isinstance(ours, dict) else {}
            merged[key] = _lay_over(base, value, f"{path}.", name, problems)
        elif value == AUTO:
            if path not in OWNED and key not in mine:
                why = f"has {path}=auto, for which eke has no value"
                problems.append(Problem(KEY, name, why, Fix(remark=f"remove {path} from {name}")))
        elif (
            (path in OWNED or (path in OWNED_ON_DISK and ours is not None))
            and value != ours
            # Off in other words: no offload is device `none`, or no section at all.
            and not (_is_off(value) and _is_off(ours))
        ):
            problems.append(_contradiction(path, value, ours, name))
        else:
            merged[key] = value
    return merged


def _is_off(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("enabled") is False
    return value in (None, False, 0, "none")


def _contradiction(path: str, theirs: Any, ours: Any, name: str) -> Problem:
    why = f"says {path}={format_value(theirs)}, the configuration {format_value(ours)}"
    if path in ("fp16.enabled", "bf16.enabled"):
        why += ": it is the format of the weights themselves, not the one that autocast computes in"
        why += f" ({path}=auto leaves it to eke)"
    fix = (OWNED | OWNED_ON_DISK)[path]
    return Problem(KEY, name, why, Fix(fix(theirs), remark=f"or: remove {path} from {name}"))


def _offload(device: str, cpu_option: str) -> str:
    return f"offload={ {'cpu': cpu_option, 'nvme': 'nvme'}.get(device, 'none') }"


def _other_optimizer(config: Config, section: Any) -> list[Problem]:
    """What the section `optimizer` says otherwise than the group `optimizer`."""
    if not isinstance(section, dict):
        return []
    name, problems = str(config.distributed.deepspeed_config), []
    theirs = str(section.get("type", AUTO)).lower()
    wanted = OPTIMIZERS.get(theirs, theirs)
    if theirs != AUTO and not config.optimizer.option.startswith(wanted):
        why = f"says optimizer.type={section['type']}, the configuration {config.optimizer.option}"
        fix = Fix(f"optimizer={wanted}", remark=f"or: remove optimizer from {name}")
        problems.append(Problem(KEY, name, why, fix))
    for key, value in dict(section.get("params") or {}).items():
        # A pair of betas, or one value; `auto` stands for both betas.
        each = value if isinstance(value, list) else [value, value]
        for field, one in zip(PARAMS.get(key, ()), each, strict=False):
            ours = getattr(config.optimizer, field, None)
            if one != AUTO and ours is not None and one != ours:
                why = f"says optimizer.params.{key}={format_value(value)}, the configuration {ours}"
                problems.append(Problem(KEY, name, why, Fix(override(f"optimizer.{field}", one))))
    return problems


def _other_schedule(config: Config, section: Any) -> list[Problem]:
    """A schedule of another shape than the group `schedule` has."""
    if not isinstance(section, dict):
        return []
    name = str(config.distributed.deepspeed_config)
    theirs = str(section.get("type", AUTO))
    wanted = SCHEDULES.get(theirs.lower())
    if theirs == AUTO or wanted == config.schedule.option:
        return []
    why = f"says scheduler.type={theirs}, the configuration {config.schedule.option}"
    fix = Fix(f"schedule={wanted}") if wanted else Fix(remark=f"remove scheduler from {name}")
    return [Problem(KEY, name, why, fix)]
