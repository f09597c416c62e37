"""The plan in Trainer's own words."""

from typing import Any

from transformers import TrainingArguments

from eke.common.errors import RunError
from eke.common.paths import RunPaths
from eke.plan.planner import Plan


def render_arguments(plan: Plan, paths: RunPaths, routed: bool = False) -> dict[str, Any]:
    """What the plan and `trainer.extra` say to Trainer, by argument.

    What eke does itself is switched off: saving, evaluating, logging, reporting, and reading every
    loss to see whether it is a number, which waits for the device in each micro-batch.
    """
    config = plan.config
    return {
        "output_dir": str(paths.folder),
        "max_steps": plan.steps.total,
        "per_device_train_batch_size": plan.batch.per_device,
        "per_device_eval_batch_size": plan.batch.eval_per_device,
        "gradient_accumulation_steps": plan.batch.accumulation,
        "learning_rate": config.optimizer.lr,
        "weight_decay": config.optimizer.weight_decay,
        "max_grad_norm": config.train.max_grad_norm or 0.0,  # Trainer's way to say: do not clip
        "seed": config.seed,
        "use_cpu": plan.device.kind == "cpu",
        "dataloader_num_workers": config.dataloader.workers,
        "dataloader_pin_memory": plan.compute.pin_memory,
        "remove_unused_columns": False,
        "ddp_find_unused_parameters": routed,
        "ddp_broadcast_buffers": False,
        "report_to": "none",
        "logging_strategy": "no",
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "log_level": "error",
        **config.trainer.extra,
    }


def build_arguments(plan: Plan, paths: RunPaths, routed: bool = False) -> TrainingArguments:
    """Trainer's arguments, checked by its own code.

    One process has one GPU: of all that it sees Trainer would make a DataParallel of its own.

    Raises:
        RunError: transformers refuses a value, or this installation lacks what it needs.
    """
    try:
        arguments = TrainingArguments(**render_arguments(plan, paths, routed))
    except (ValueError, TypeError, KeyError, ImportError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise RunError(f"engine = trainer: transformers refuses its arguments: {reason}") from error
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments
