"""From a checked configuration to a plan: every derived decision, each with its reason."""

import math
from collections.abc import Mapping, Sequence

from eke import corpus as corpora
from eke.errors import ConfigError, Problem
from eke.hardware import Device, machine_fingerprint
from eke.identity import run_id
from eke.plan.plan import BatchPlan, ComputePlan, Decision, Plan, StepPlan
from eke.schema import MAX_STEPS, Compute, Config, Switch, Synthetic
from eke.schema.codec import make_converter
from eke.sizes import model_size

DEFAULT_STEPS = 300
"""Steps when neither `train.steps` nor `train.epochs` says how long: the default run falls clearly
in loss within about a minute on two cores."""

DEFAULT_SYNTHETIC_SAMPLES = 512
"""The guides' data set size (https://huggingface.co/docs/transformers/model_memory_anatomy)."""


def make_plan(
    config: Config,
    choices: Mapping[str, str],
    overrides: Sequence[str],
    device: Device,
    device_reason: str,
    warnings: Sequence[str] = (),
) -> Plan:
    """Decide everything the configuration leaves open.

    Args:
        config: checked: no rule finds it impossible.
        choices: option of each group.
        overrides: what was typed.
        device: what it will run on, or is planned for.
        device_reason: why this device.
        warnings: findings of the rules that do not forbid the run.

    Raises:
        ConfigError: the data holds too little for one sample or one step.
    """
    decisions = [Decision("hardware", device.name, device_reason)]
    batch = _plan_batch(config, decisions)
    source = corpora.open_corpus(config)
    steps = _plan_steps(config, batch, source, decisions)
    compute = _plan_compute(config, device, decisions)
    data = corpora.fingerprint(source) if source else "synthetic"
    resolved = _resolved(config, batch, steps, compute)
    identity = run_id(make_converter().unstructure(config), resolved, data)
    return Plan(
        run_id=identity,
        name=" ".join(overrides) or "defaults",
        config=config,
        choices=dict(choices),
        overrides=tuple(overrides),
        device=device,
        batch=batch,
        steps=steps,
        compute=compute,
        size=model_size(config),
        decisions=tuple(decisions),
        warnings=tuple(warnings),
        machine=machine_fingerprint(device),
        data_fingerprint=data,
    )


def _resolved(
    config: Config, batch: BatchPlan, steps: StepPlan, compute: ComputePlan
) -> dict[str, object]:
    """Answers to what the configuration leaves open, and None for how they were asked."""
    answers: dict[str, object] = {
        "train.steps": steps.total,
        "train.epochs": None,
        "batch.accumulation": batch.accumulation,
        "batch.target": None,
        "batch.eval_per_device": batch.eval_per_device,
        "batch.option": None,
        "data.num_samples": steps.num_train_samples,
        "data.num_eval_samples": steps.num_eval_samples,
        "schedule.warmup_steps": steps.warmup,
        "schedule.warmup_frac": None,
        "precision.tf32": compute.tf32,
        "dataloader.pin_memory": compute.pin_memory,
        "optimizer.implementation": compute.optimizer_implementation,
    }
    if hasattr(config.data, "path"):
        answers["data.path"] = None  # the content counts, not where it lies
    return answers


def _plan_batch(config: Config, decisions: list[Decision]) -> BatchPlan:
    batch, world_size = config.batch, config.distributed.num_processes
    accumulation = batch.accumulation or 1
    if batch.target is not None:
        accumulation = batch.target // (batch.per_device * world_size)
        reason = f"batch.target {batch.target} / ({batch.per_device} x {world_size} processes)"
        decisions.append(Decision("batch.accumulation", str(accumulation), reason))
    plan = BatchPlan(
        per_device=batch.per_device,
        accumulation=accumulation,
        world_size=world_size,
        eval_per_device=batch.eval_per_device or batch.per_device,
    )
    reason = f"{batch.per_device} per device x {accumulation} accumulated x {world_size} processes"
    decisions.append(Decision("samples per step", str(plan.samples_per_step), reason))
    return plan


def _plan_steps(
    config: Config, batch: BatchPlan, source: corpora.Corpus | None, decisions: list[Decision]
) -> StepPlan:
    train, evaluation = _count_samples(config, source, decisions)
    per_epoch = math.ceil(train / batch.samples_per_step)
    if config.train.epochs is not None:
        total = max(1, math.ceil(per_epoch * config.train.epochs))
        reason = f"{config.train.epochs:g} epochs of {per_epoch} steps"
    elif config.train.steps is not None:
        total, reason = config.train.steps, ""
    else:
        total, reason = DEFAULT_STEPS, "neither train.steps nor train.epochs was given"
    if reason:
        decisions.append(Decision("train.steps", str(total), reason))
    warmup = config.schedule.warmup_steps
    if warmup is None:
        warmup = round(total * config.schedule.warmup_frac)
        reason = f"schedule.warmup_frac {config.schedule.warmup_frac:g} x {total} steps"
        decisions.append(Decision("schedule.warmup_steps", str(warmup), reason))
    problems = _impossible_lengths(config, batch, total, warmup, train)
    if problems:
        raise ConfigError(problems)
    return StepPlan(total, per_epoch, warmup, train, evaluation)


def _impossible_lengths(
    config: Config, batch: BatchPlan, total: int, warmup: int, num_samples: int
) -> list[Problem]:
    """What rules cannot know, since it depends on how much data there is."""
    problems = []
    if batch.samples_per_step > num_samples:
        why = (
            f"makes steps of {batch.samples_per_step} samples; there are {num_samples} to train "
            "on, and no step has a sample twice"
        )
        fix = _smaller_batch(config, batch, num_samples)
        problems.append(Problem("batch.per_device", str(batch.per_device), why, fix))
    if total > MAX_STEPS:
        why = f"makes {total} steps; {MAX_STEPS} is the most a run may have"
        problems.append(Problem("train.epochs", f"{config.train.epochs:g}", why, "train.epochs=1"))
    if warmup > total:
        why = f"is longer than the run, {total} steps"
        fix = f"schedule.warmup_steps={total // 10}"
        problems.append(Problem("schedule.warmup_steps", str(warmup), why, fix))
    return problems


def _smaller_batch(config: Config, batch: BatchPlan, num_samples: int) -> str:
    """The largest batch of which there is a whole one."""
    unit = batch.per_device * batch.world_size
    if unit <= num_samples:
        key = "target" if config.batch.target is not None else "accumulation"
        pieces = num_samples // unit
        return f"batch.{key}={pieces * unit if key == 'target' else pieces}"
    fixes = [f"batch.per_device={max(1, num_samples // batch.world_size)}"]
    fixes += [
        f"batch.{key}=null"
        for key in ("accumulation", "target")
        if getattr(config.batch, key) is not None
    ]
    return " ".join(fixes)


def _count_samples(
    config: Config, source: corpora.Corpus | None, decisions: list[Decision]
) -> tuple[int, int]:
    data = config.data
    if source is None:
        assert isinstance(data, Synthetic)
        train = data.num_samples or DEFAULT_SYNTHETIC_SAMPLES
        if data.num_samples is None:
            decisions.append(Decision("data.num_samples", str(train), "the guides' data set size"))
        return train, data.num_eval_samples
    length = corpora.window_length(config)
    available = corpora.count_windows(source.train, length)
    available_eval = corpora.count_windows(source.evaluation, length)
    if not available or not available_eval:
        part = "training" if not available else "evaluation"
        raise ConfigError(
            Problem(
                "data.seq_len",
                str(data.seq_len),
                f"the {part} part of the text is shorter than one sample of {length} tokens",
                "data.seq_len=4" if data.seq_len > 4 else "data.path=LONGER_TEXT",
            )
        )
    train = min(data.num_samples or available, available)
    if data.num_samples is None:
        reason = f"all the training text holds, in samples of {length} tokens"
        decisions.append(Decision("data.num_samples", str(train), reason))
    elif train < data.num_samples:
        reason = f"the training text holds no more; {data.num_samples} were asked for"
        decisions.append(Decision("data.num_samples", str(train), reason))
    return train, min(data.num_eval_samples, available_eval)


def _plan_compute(config: Config, device: Device, decisions: list[Decision]) -> ComputePlan:
    compute = config.precision.compute
    autocast = None if compute is Compute.float32 else compute.value
    scaling = compute is Compute.float16
    if scaling:
        decisions.append(Decision("loss scaling", "on", "float16 gradients underflow below 6e-8"))
    tf32 = config.precision.tf32 is Switch.on
    if config.precision.tf32 is Switch.auto:
        decisions.append(Decision("precision.tf32", "off", "PyTorch's default"))
    pin = config.dataloader.pin_memory
    pinned = device.kind == "cuda" if pin is Switch.auto else pin is Switch.on
    implementation = _implementation(config, device, decisions)
    return ComputePlan(autocast, scaling, tf32, implementation, pinned and device.kind == "cuda")


def _implementation(config: Config, device: Device, decisions: list[Decision]) -> str:
    option = config.optimizer.option
    if not option.startswith("adamw"):
        return ""
    if option != "adamw":
        return option.removeprefix("adamw_")
    reason = f"torch has a fused AdamW for {device.kind}: one kernel, no temporaries"
    decisions.append(Decision("optimizer implementation", "fused", reason))
    return "fused"
