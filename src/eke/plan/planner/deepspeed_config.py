"""DeepSpeed's configuration, derived from the configuration of a run and from a user's file.

eke keeps precision and loss (autocast around the model, a loss summed over ranks). DeepSpeed
shards, clips and updates. Its `bf16` means bfloat16 weights. Default sizes equal `auto` in
transformers 5.23 (`HfTrainerDeepSpeedConfig`).
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
from eke.plan.record import table

Settings = dict[str, Any]
"""Content of a ds_config.json."""

OFFLOADED: dict[str, dict[str, str]] = {
    "none": {},
    "optimizer_cpu": {"offload_optimizer": "cpu"},
    "params_cpu": {"offload_optimizer": "cpu", "offload_param": "cpu"},
}
"""Option of the group `offload` -> DeepSpeed's section and device."""


def deepspeed_settings(config: Config, batch: BatchPlan, device_kind: str) -> Settings:
    """Return DeepSpeed's configuration with every key that changes memory or mathematics.

    `distributed` is one of STAGE, `device_kind` `cpu` or `cuda` (with page-locked memory).
    """
    settings = {
        "train_batch_size": batch.samples_per_step,
        "train_micro_batch_size_per_gpu": batch.per_device,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": config.train.max_grad_norm or 0.0,
        "zero_optimization": _zero(config, device_kind),
        "fp16": {"enabled": False},
        "bf16": {"enabled": config.precision.weights is Weights.bfloat16},
        # eke's rules reject optimizers that fail. DeepSpeed's list is shorter.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if isinstance(config.offload, NvmeOffload):
        settings["aio"] = {  # complete, since DeepSpeed's defaults limit the disk's speed
            "block_size": config.offload.block_bytes,
            "queue_depth": config.offload.queue_depth,
            "intra_op_parallelism": config.offload.threads,
            "single_submit": False,
            "overlap_events": True,
            "use_gds": False,
        }
    return settings


def _zero(config: Config, device_kind: str) -> Settings:
    stage, width = STAGE[config.distributed.option], config.model.hidden_size
    zero: Settings = {
        "stage": stage,
        "overlap_comm": device_kind == "cuda",  # uses a second CUDA stream
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
    offload = config.offload
    pinned = {"pin_memory": device_kind == "cuda"}
    if not isinstance(offload, NvmeOffload):
        places = OFFLOADED[offload.option]
        return {key: {"device": device, **pinned} for key, device in places.items()}
    disk = {"device": "nvme", "nvme_path": str(user_path(offload.path)), **pinned}
    # `pipeline_read` and `pipeline_write` stay off: they need twice the buffers.
    sections: Settings = {"offload_optimizer": {**disk, "buffer_count": PIECE_BUFFERS}}
    if offload.weights is WeightsPlace.host:
        sections["offload_param"] = {"device": "cpu", **pinned}
    if offload.weights is WeightsPlace.disk:  # rejected by a rule
        weights, processes = training_structure(config).weights, config.distributed.num_processes
        sections["offload_param"] = {
            **disk,
            "buffer_count": 5,  # DeepSpeed's default
            "buffer_size": max(-(-prod(w.shape) // processes) for w in weights),
            "max_in_cpu": 0,  # by default the first 1e9 weights stay in host memory
        }
    return sections


_KEY = "distributed.deepspeed_config"
_AUTO = "auto"

_OWNED: dict[str, Callable[[Any], str]] = {
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
"""Key of DeepSpeed set by the plan -> override equivalent to a value in the user's file."""

_OWNED_ON_DISK: dict[str, Callable[[Any], str]] = {
    "zero_optimization.offload_optimizer.nvme_path": lambda value: f"offload.path={value}",
    "zero_optimization.offload_param.nvme_path": lambda value: f"offload.path={value}",
    "zero_optimization.sub_group_size": lambda value: f"offload.piece_numbers={value:.0f}",
    "aio.block_size": lambda value: f"offload.block_bytes={value}",
    "aio.queue_depth": lambda value: f"offload.queue_depth={value}",
    "aio.intra_op_parallelism": lambda value: f"offload.threads={value}",
}
"""Further keys as in OWNED, only with `offload=nvme`."""

_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "lion": "lion", "muon": "muon"}
"""DeepSpeed's name of an optimizer -> prefix of eke's options."""

_SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
"""DeepSpeed's name of a schedule -> eke's option."""

_SAME = ("lr", "eps", "weight_decay", "momentum")
_PARAMS: dict[str, tuple[str, ...]] = {"betas": ("beta1", "beta2")} | {key: (key,) for key in _SAME}
"""Key of `optimizer.params` -> fields of the group `optimizer`."""


_KNOWN = {
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16", "checkpoint",
    "comms_logger", "communication_data_type", "compile", "compression_training", "csv_monitor",
    "curriculum_learning", "data_efficiency", "data_types", "disable_allgather", "dump_state",
    "elasticity", "flops_profiler", "fp16", "gradient_predivide_factor", "memory_breakdown",
    "optimizer", "prescale_gradients", "scheduler", "seq_parallel_communication_data_type",
    "sparse_attention", "sparse_gradients", "steps_per_print", "tensorboard", "timers",
    "torch_autocast", "wall_clock_breakdown", "wandb", "zero_optimization",
}  # fmt: skip
"""Keys read by DeepSpeed 0.19 (https://www.deepspeed.ai/docs/config-json)."""

_FORBIDDEN = {
    "torch_autocast": "eke already uses autocast",
    "amp": "eke already uses mixed precision",
    "data_types": "eke chooses the formats of gradients",
    "bfloat16": "this is the old name of bf16",
    "sparse_gradients": "the gradient norm would differ",
    "compression_training": "it changes the model during training",
    "curriculum_learning": "eke determines the order of samples",
    "data_efficiency": "eke determines the order of samples",
    "elasticity": "eke determines the number of samples in a step",
    "prescale_gradients": "the loss is already divided",
    "gradient_predivide_factor": "the loss is already divided",
}
"""Sections that would change the planned mathematics -> reason for rejecting them."""


def read_user_settings(config: Config) -> Settings | None:
    """Read the user's file, None without one; ConfigError if it is not a JSON object."""
    name = config.distributed.deepspeed_config
    if name is None:
        return None
    why = "is not a JSON object"
    try:
        content = json.loads(user_path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        content, why = None, f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if not isinstance(content, dict):
        raise ConfigError(Problem(_KEY, name, why, Fix(f"{_KEY}=null"), "unreadable"))
    return content


def merge_user_settings(
    config: Config, mine: Settings, theirs: Settings
) -> tuple[Settings, list[str]]:
    """Return eke's settings updated by the user's, and warnings.

    `auto` means eke's value. The sections `optimizer` and `scheduler` are only compared with the
    plan. ConfigError with every contradiction, both values and an override.
    """
    name = str(config.distributed.deepspeed_config)
    problems = [
        _problem(name, f"has {key}, but {why}", Fix(remark=f"remove {key} from {name}"))
        for key, why in _FORBIDDEN.items()
        if key in theirs and not _is_off(theirs[key])
    ]
    problems += _optimizer_problems(config, table(theirs, "optimizer"))
    problems += _other_schedule(config, table(theirs, "scheduler"))
    rest = {k: v for k, v in theirs.items() if k not in ("optimizer", "scheduler", *_FORBIDDEN)}
    merged = _merge_settings(mine, rest, "", name, problems)
    if problems:
        raise ConfigError(problems)
    unknown = sorted(set(rest) - _KNOWN - set(mine))
    return merged, [f"{_KEY} = {name}: {key} is unknown to DeepSpeed" for key in unknown]


def _merge_settings(
    mine: Settings, theirs: Settings, prefix: str, name: str, problems: list[Problem]
) -> Settings:
    """Merge nested dictionaries; `theirs` replaces keys that the plan does not set."""
    merged = dict(mine)
    for key, value in theirs.items():
        path = f"{prefix}{key}"
        ours = mine.get(key)
        if isinstance(value, dict):
            base = ours if isinstance(ours, dict) else {}
            merged[key] = _merge_settings(base, value, f"{path}.", name, problems)
        elif value == _AUTO:
            if path not in _OWNED and key not in mine:
                why = f"has {path}=auto, but eke does not set {path}"
                problems.append(_problem(name, why, Fix(remark=f"remove {path} from {name}")))
        elif (
            (path in _OWNED or (path in _OWNED_ON_DISK and ours is not None))
            and value != ours
            # Equivalent values of off: without offload the device is `none` or the section missing.
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
    why = f"has {path}={format_value(theirs)}, but the configuration {format_value(ours)}"
    if path in ("fp16.enabled", "bf16.enabled"):
        why += f": it sets the format of weights, not of autocast ({path}=auto: eke chooses)"
    fix = (_OWNED | _OWNED_ON_DISK)[path]
    return _problem(name, why, Fix(fix(theirs), remark=f"or: remove {path} from {name}"))


def _problem(name: str, why: str, fix: Fix) -> Problem:
    return Problem(_KEY, name, why, fix, "deepspeed_entry")


def _offload(device: str, cpu_option: str) -> str:
    return f"offload={ {'cpu': cpu_option, 'nvme': 'nvme'}.get(device, 'none') }"


def _optimizer_problems(config: Config, section: Settings) -> list[Problem]:
    name, problems = str(config.distributed.deepspeed_config), []
    theirs = str(section.get("type", _AUTO)).lower()
    wanted = _OPTIMIZERS.get(theirs, theirs)
    if theirs != _AUTO and not config.optimizer.option.startswith(wanted):
        why = f"has optimizer.type={section['type']}, but optimizer={config.optimizer.option}"
        fix = Fix(f"optimizer={wanted}", remark=f"or: remove optimizer from {name}")
        problems.append(_problem(name, why, fix))
    for key, value in dict(section.get("params") or {}).items():
        # A pair of betas or one value; `auto` may replace both betas.
        each = value if isinstance(value, list) else [value, value]
        for field, one in zip(_PARAMS.get(key, ()), each, strict=False):
            ours = getattr(config.optimizer, field, None)
            if one != _AUTO and ours is not None and one != ours:
                why = f"has optimizer.params.{key}={format_value(value)}, but {field} is {ours}"
                problems.append(_problem(name, why, Fix(override(f"optimizer.{field}", one))))
    return problems


def _other_schedule(config: Config, section: Settings) -> list[Problem]:
    name = str(config.distributed.deepspeed_config)
    theirs = str(section.get("type", _AUTO))
    wanted = _SCHEDULES.get(theirs.lower())
    if theirs == _AUTO or wanted == config.schedule.option:
        return []
    why = f"has scheduler.type={theirs}, but schedule={config.schedule.option}"
    fix = Fix(f"schedule={wanted}") if wanted else Fix(remark=f"remove scheduler from {name}")
    return [_problem(name, why, fix)]
