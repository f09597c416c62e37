"""Planning of a checked configuration: every derived decision with its reason."""

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from eke.common.errors import ConfigError, Fix, Problem
from eke.common.files import remove_tree
from eke.common.paths import RunPaths, user_path
from eke.common.text import format_bytes, format_number
from eke.config import schema
from eke.config.schema import AutoBool, Backend, Config, PretrainedModel
from eke.config.schema.codec import make_converter
from eke.hardware import Device, machine_fingerprint, usable_cores
from eke.models import sizes
from eke.models.checkpoints.architecture import router_loss
from eke.models.families import FLOAT32_BYTES, Role, Tokens, family_of
from eke.models.sizes.optimizers import AUTO
from eke.plan.identity import run_id
from eke.plan.own_code import Code
from eke.plan.planner.deepspeed_config import (
    Settings,
    deepspeed_settings,
    merge_user_settings,
    read_user_settings,
)
from eke.plan.planner.inputs import inputs_of
from eke.plan.planner.lengths import sample_means
from eke.plan.planner.plan import (
    BatchPlan,
    ComputePlan,
    DataPlan,
    Decision,
    Plan,
    StepPlan,
    plan_to_plain,
    source_sizes,
)
from eke.plan.planner.samples import DEFAULT_STEPS, batch_of, plan_batch, plan_data
from eke.plan.record import Failure, Outcome, Record, Timing, metrics

PLACES = ("path", "pattern", "eval_path", "tokenizer", "name", "revision", "streaming",
          "max_bad_frac", "bad_rows", "messages", "chat_template", "train_on")  # fmt: skip
"""Keys of `data` for the origin of samples. Only the hash of their content is in the identity."""


def make_plan(
    config: Config,
    choices: Mapping[str, str],
    overrides: Sequence[str],
    device: Device,
    device_reason: str,
    warnings: Sequence[str] = (),
    code: Code | None = None,
) -> Plan:
    """Resolve all open settings of a checked configuration. `code` is what it names as own code.

    Raises:
        ConfigError: the data is too small for one sample or one step, or the user's DeepSpeed file
            contradicts `config` (also in `replan` and `with_batch`).
    """
    decisions = [Decision("hardware", device.name, device_reason)]
    batch = plan_batch(config, decisions)
    data = plan_data(config, decisions)
    steps = _plan_steps(config, batch, data, decisions)
    compute = _plan_compute(config, device, steps.warmup, decisions)
    _plan_peft(config, decisions)
    if (coefficient := router_loss(config)) is not None:
        reason = "a mean over a micro-batch, so it depends on batch.per_device"
        decisions.append(Decision("task.router_loss", f"{coefficient:g}", reason))
    theirs = read_user_settings(config)
    deepspeed, hints = _plan_deepspeed(config, batch, device, theirs, decisions)
    _plan_sharding(config, device, decisions)
    # The settings of the user's DeepSpeed file are part of the run's identity.
    resolved = _resolved(config, batch, steps, compute, theirs) | _plan_rank(config, decisions)
    return Plan(
        run_id=run_id(
            make_converter().unstructure(config), resolved, data.fingerprint, _digest(code)
        ),
        name=" ".join(overrides) or "defaults",
        config=config,
        choices=dict(choices),
        overrides=tuple(overrides),
        device=device,
        batch=batch,
        steps=steps,
        compute=compute,
        size=sizes.model_size(config, sample_means(config, data.store, data.train, data.sources)),
        decisions=tuple(decisions),
        warnings=(*warnings, *(code.warnings if code else ()), *data.warnings, *hints),
        data_warnings=data.warnings,
        machine=machine_fingerprint(device),
        data_fingerprint=data.fingerprint,
        inputs=inputs_of(config, data.fingerprint),
        vocabulary=data.vocabulary,
        store=data.store,
        sources=data.sources,
        deepspeed=deepspeed,
        code=code,
    )


def _digest(code: Code | None) -> str:
    return code.digest if code else ""


def replan(plan: Plan, config: Config) -> Plan:
    """Return the plan with other techniques for a forecast; data, length and identity stay."""
    batch = plan_batch(config, [])
    deepspeed, _ = _plan_deepspeed(config, batch, plan.device, read_user_settings(config), [])
    means = sample_means(config, plan.store, plan.steps.num_train_samples, plan.sources)
    compute = _plan_compute(config, plan.device, plan.steps.warmup, [])
    size = sizes.model_size(config, means)
    return replace(
        plan, config=config, batch=batch, compute=compute, size=size, deepspeed=deepspeed
    )


def with_batch(
    plan: Plan, config: Config, reasons: Sequence[Decision], warnings: Sequence[str]
) -> Plan:
    """Return the plan with other micro-batches, equal to `make_plan` of the configuration."""
    own: list[Decision] = []
    batch = plan_batch(config, own)
    theirs = read_user_settings(config)
    deepspeed, hints = _plan_deepspeed(config, batch, plan.device, theirs, [])
    _plan_sharding(config, plan.device, own)
    resolved = _resolved(config, batch, plan.steps, plan.compute, theirs) | _plan_rank(config, [])
    first, *others = plan.decisions
    made = {decision.key for decision in own}
    kept = [decision for decision in others if decision.key not in made]
    return replace(
        plan,
        run_id=run_id(
            make_converter().unstructure(config),
            resolved,
            plan.data_fingerprint,
            _digest(plan.code),
        ),
        config=config,
        batch=batch,
        decisions=(first, *reasons, *own, *kept),
        warnings=(*warnings, *plan.data_warnings, *hints),
        deepspeed=deepspeed,
    )


def _resolved(
    config: Config, batch: BatchPlan, steps: StepPlan, compute: ComputePlan, theirs: Settings | None
) -> dict[str, object]:
    """Return values for all open settings; keys that requested them become None."""
    answers: dict[str, object] = {
        "train.steps": steps.total,
        "train.epochs": None,
        "batch.per_device": batch.per_device,
        "batch.accumulation": batch.accumulation,
        "batch.target": None,
        "batch.eval_per_device": batch.eval_per_device,
        "batch.option": None,
        "data.num_samples": steps.num_train_samples,
        "data.num_eval_samples": steps.num_eval_samples,
        "schedule.warmup_steps": steps.warmup,
        "schedule.warmup_frac": None,
        "precision.tf32": compute.tf32,
        "precision.master": compute.master,
        "precision.evaluation": compute.eval_autocast or compute.weights,
        "dataloader.pin_memory": compute.pin_memory,
        "optimizer.implementation": compute.optimizer_implementation,
        "task.router_loss": router_loss(config),
    }
    if isinstance(config.model, PretrainedModel):
        # model.content identifies the checkpoint and the commit.
        answers |= {"model.name_or_path": None, "model.revision": None}
    if isinstance(config.peft, schema.Adapters):
        answers["peft.base_weights"] = None if compute.frozen == compute.weights else compute.frozen
    if adapted := sizes.adapted_layers(config):
        answers["peft.target_modules"] = list(adapted)
    if theirs is not None:
        answers["distributed.deepspeed_config"] = theirs  # content instead of path
    if isinstance(config.data, schema.Mix):  # the fingerprint includes content, weights and names
        answers["data.sources"] = None
    answers |= {f"data.{place}": None for place in PLACES if hasattr(config.data, place)}
    if isinstance(config.data, schema.LocalRows):
        answers["data.streaming"] = False
    if isinstance(config.distributed, schema.FSDP):
        answers["distributed.exchange"] = sizes.exchange_of(config).value
    if config.data.is_stream:  # these keys determine the order and the end of the stream
        answers |= {"data.streaming": True, "data.num_samples": config.data.num_samples}
    return answers


def _plan_steps(
    config: Config, batch: BatchPlan, data: DataPlan, decisions: list[Decision]
) -> StepPlan:
    train, evaluation = data.train, data.evaluation
    per_epoch = math.ceil(train / batch.samples_per_step)
    if config.train.epochs is not None:
        total = max(1, math.ceil(per_epoch * config.train.epochs))
        epochs = "1 epoch" if config.train.epochs == 1 else f"{config.train.epochs:g} epochs"
        reason = f"{epochs} of {format_number(per_epoch, 'step')}"
    elif config.train.steps is not None:
        total, reason = config.train.steps, ""
    else:
        total, reason = DEFAULT_STEPS, "default without train.steps and train.epochs"
    if reason:
        decisions.append(Decision("train.steps", str(total), reason))
    warmup = config.schedule.warmup_steps
    if warmup is None:
        warmup = round(total * config.schedule.warmup_frac)
        reason = f"schedule.warmup_frac {config.schedule.warmup_frac:g} x {total} steps"
        decisions.append(Decision("schedule.warmup_steps", str(warmup), reason))
    if problems := _impossible_lengths(config, batch, total, warmup, train):
        raise ConfigError(problems)
    return StepPlan(total, per_epoch, warmup, train, evaluation)


def _impossible_lengths(
    config: Config, batch: BatchPlan, total: int, warmup: int, num_samples: int
) -> list[Problem]:
    """Return problems that depend on the amount of data, which rules do not have."""
    problems = []
    if batch.samples_per_step > num_samples:
        why = f"needs {batch.samples_per_step} samples per step, only {num_samples} for training"
        fix = batch_of(config, batch, num_samples)
        key = "per_device" if config.batch.target is None else "target"
        value = str(getattr(config.batch, key))
        problems.append(Problem(f"batch.{key}", value, why, fix, "too_few_samples"))
    if total > schema.MAX_STEPS:
        why = f"means {total} steps, the limit is {schema.MAX_STEPS}"
        epochs, fix = f"{config.train.epochs:g}", Fix("train.epochs=1")
        problems.append(Problem("train.epochs", epochs, why, fix, "limit"))
    if warmup > total:
        why = f"is longer than the run ({format_number(total, 'step')})"
        key, fix = "schedule.warmup_steps", Fix(f"schedule.warmup_steps={total // 10}")
        problems.append(Problem(key, str(warmup), why, fix, "warmup_within_run"))
    return problems


def _plan_deepspeed(
    config: Config,
    batch: BatchPlan,
    device: Device,
    theirs: Settings | None,
    decisions: list[Decision],
) -> tuple[Settings | None, list[str]]:
    if config.distributed.option not in sizes.STAGE:
        return None, []
    mine = deepspeed_settings(config, batch, device.kind)
    zero = mine["zero_optimization"]
    reason = "hidden_size squared, as auto in transformers"
    decisions.append(Decision("DeepSpeed bucket", str(zero["reduce_bucket_size"]), reason))
    is_random = not isinstance(config.model, PretrainedModel)
    if zero["stage"] == 3 and device.kind == "cuda" and is_random:
        reason = "the random numbers differ from a GPU's, so losses differ from runs without ZeRO-3"
        decisions.append(Decision("random weights", "drawn on the host", reason))
    if theirs is None:
        return mine, []
    reason = f"added to eke's settings: {', '.join(sorted(theirs)) or 'no keys'}"
    name = str(config.distributed.deepspeed_config)
    decisions.append(Decision("distributed.deepspeed_config", name, reason))
    return merge_user_settings(config, mine, theirs)


def _plan_sharding(config: Config, device: Device, decisions: list[Decision]) -> None:
    if not isinstance(config.distributed, schema.FSDP):
        return
    if config.distributed.exchange is schema.GradientSync.auto:
        reason = f"full gradients up to {format_bytes(sizes.WHOLE_GRADIENTS_BYTES)}, shards above"
        decisions.append(Decision("distributed.exchange", sizes.exchange_of(config).value, reason))
    ahead = device.kind != "cpu"
    reason = "sent during computation" if ahead else "the same cores send and compute"
    decisions.append(Decision("prefetched layers", str(int(ahead)), reason))


def _plan_compute(
    config: Config, device: Device, warmup: int, decisions: list[Decision]
) -> ComputePlan:
    precision, formats = config.precision, sizes.decide_formats(config)
    compute, evaluation = precision.compute.value, precision.evaluation.value
    if precision.evaluation is schema.Evaluation.same:
        evaluation = compute
    # None: the weights already have the format.
    autocast, eval_autocast = (
        None if each == precision.weights.value else each for each in (compute, evaluation)
    )
    scaling = precision.compute is schema.Compute.float16
    if scaling:
        decisions.append(Decision("loss scaling", "on", "float16 gradients underflow below 6e-8"))
    if precision.tf32 is AutoBool.auto:
        decisions.append(Decision("precision.tf32", "off", "PyTorch's default"))
    if precision.weights is schema.Weights.bfloat16 and precision.master is AutoBool.auto:
        reason = f"{FLOAT32_BYTES} bytes per parameter in addition to bfloat16"
        if formats.master:
            reason = "DeepSpeed's ZeRO updates float32 copies of its shard of the weights"
        decisions.append(Decision("precision.master", "on" if formats.master else "off", reason))
    # Only frozen weights may have another format: the optimizer never rounds them.
    # Weights that model.freeze excludes from training are stored like the base of adapters.
    without_adapters = schema.BaseWeights.auto if config.model.freeze else None
    base = getattr(config.peft, "base_weights", without_adapters)
    if base is schema.BaseWeights.auto:
        other = "precision.evaluation differs from precision.compute"
        alike = formats.frozen == compute
        reason = "the format of computation" if alike else other
        key = "frozen weights" if config.model.freeze else "peft.base_weights"
        decisions.append(Decision(key, formats.frozen, reason + _tied_head(config)))
    implementation = _implementation(config, device, decisions)
    clipped = config.train.max_grad_norm
    decay = config.optimizer.weight_decay
    rises = f" after a warm-up from 1/{warmup} of it (transformers: from 0)" if warmup else ""
    reason = f"schedule={config.schedule.option}{rises}, weight decay {decay:g}, gradients " + (
        "not clipped" if clipped is None else f"clipped to norm {clipped:g}"
    )
    decisions.append(Decision("learning rate", f"{config.optimizer.lr:g}", reason))
    model = config.model
    if isinstance(model, PretrainedModel) and model.supports_sdpa is False:
        reason = f"the class for {model.model_type} in transformers has no sdpa"
        decisions.append(Decision("attention", config.attention.option, reason))
    if avoids_cudnn(config, device):
        reason = "lengths differ, and cuDNN needs 0.3 s or more for each (H100, cuDNN 9.19)"
        decisions.append(Decision("attention.backend", "auto, without cudnn", reason))
    if maps_memory(config, device):
        reason = "lengths differ: without it 57 GiB were reserved for 30 GiB in use (H100, 1B)"
        decisions.append(Decision("CUDA memory", "expandable segments", reason))
    return ComputePlan(
        autocast=autocast,
        loss_scaling=scaling,
        tf32=precision.tf32 is AutoBool.on,
        optimizer_implementation=implementation,
        pin_memory=device.kind == "cuda" and config.dataloader.pin_memory is not AutoBool.off,
        float8=precision.float8.value,
        eval_autocast=eval_autocast,
        **vars(formats),
    )


def _tied_head(config: Config) -> str:
    """Return a clause for a frozen embedding that is also the output projection."""
    weights = sizes.training_structure(config).weights if config.model.freeze else ()
    frozen = [w.place is Role.embedding and w.tokens for w in weights if not w.trained]
    tied = any(tokens and tokens is not Tokens.none for tokens in frozen)
    return ", and the tied output projection is frozen with the embedding" if tied else ""


def _plan_rank(config: Config, decisions: list[Decision]) -> dict[str, object]:
    if not sizes.optimizer_entry(config.optimizer).projects:
        return {}
    rank = sizes.projection_rank(config)
    if getattr(config.optimizer, "rank", None) is None:
        reason = f"a quarter of model.hidden_size {config.model.hidden_size}"
        decisions.append(Decision("optimizer.rank", str(rank), reason))
    return {"optimizer.rank": rank}


def _implementation(config: Config, device: Device, decisions: list[Decision]) -> str:
    named = sizes.optimizer_entry(config.optimizer).implementation
    if named != AUTO:
        return named
    chosen = "fused"
    reason = f"torch has a fused AdamW for {device.kind}: one kernel without temporaries"
    if config.offload.option != "none":
        chosen = "deepspeed_cpu"
        reason = "the update runs on the host CPU with vector instructions"
    decisions.append(Decision("optimizer implementation", chosen, reason))
    return chosen


def _plan_peft(config: Config, decisions: list[Decision]) -> None:
    adapted = sizes.adapted_layers(config)
    if isinstance(config.peft, schema.Adapters) and config.peft.target_modules is None:
        reason = f"all linear layers in Transformer layers of {family_of(config).name} models"
        if sizes.is_ia3(config):
            reason = "keys, values and the feed-forward's inner activations: arXiv:2205.05638"
        if family_of(config).is_moe:
            has_experts = getattr(config.peft, "experts", False)
            reason += f", {'also' if has_experts else 'not the'} stacked experts"
        value = ",".join(sorted({name.rpartition(".")[2] for name in adapted})) or "all"
        decisions.append(Decision("peft.target_modules", f"[{value}]", reason))


FLASH_CAPABILITY = (8, 0)
"""Capability for kernels that share key-value heads: flash and cuDNN (sdp_utils.cpp)."""


def shares_heads(plan: Plan, dtype: str | None = None) -> bool:
    """Return whether an attention kernel supports fewer key-value heads than query heads.

    Otherwise PyTorch (2.13) silently uses its math path, whose scores grow with the square of the
    length: the memory-efficient kernel requires equal numbers. `dtype` is the torch name of
    attention's format, by default the plan's training format.
    """
    attention, device = plan.config.attention, plan.device
    if device.kind != "cuda" or attention.option != "sdpa":
        return True
    if attention.backend is Backend.mem_efficient:
        return False
    if attention.backend is not Backend.auto:
        return True  # the configured kernel supports it
    new_enough = (device.capability or FLASH_CAPABILITY) >= FLASH_CAPABILITY
    return new_enough and (dtype or plan.compute.matmul) in ("float16", "bfloat16")


def workspace_bytes(capability: tuple[int, int] | None) -> int:
    """Return the bytes of cuBLAS' workspace per handle and stream."""
    # Source: torch's parseChosenWorkspaceSize (aten/src/ATen/cuda/CublasHandlePool.cpp).
    # The threads of forward and backward pass have one handle each.
    return (32 * 2**10 if (capability or (0, 0)) >= (9, 0) else 2 * 4096 + 8 * 16) * 2**10


_CUDNN_FIRST = (9, 0)
"""Capability from which PyTorch prefers cuDNN's attention (sdp_utils.cpp, torch 2.11)."""


def avoids_cudnn(config: Config, device: Device) -> bool:
    """Return whether to disable cuDNN's attention, which is slow for every new length."""
    attention = config.attention
    is_open = attention.option == "sdpa" and attention.backend is Backend.auto
    is_first = device.is_nvidia and (device.capability or _CUDNN_FIRST) >= _CUDNN_FIRST
    return is_open and is_first and _has_many_lengths(config)


def maps_memory(config: Config, device: Device) -> bool:
    """Return whether to use expandable segments in CUDA's allocator."""
    # A setting of the user has precedence.
    is_set = any(os.environ.get(f"PYTORCH_{kind}ALLOC_CONF") for kind in ("", "CUDA_"))
    return device.is_nvidia and not is_set and _has_many_lengths(config)


def _has_many_lengths(config: Config) -> bool:
    data = config.data
    lengths = data.seq_len / (data.pad_to_multiple_of or 1)
    # cuDNN prepares 16 lengths in the time of a few steps.
    return sizes.is_ragged(config) and data.packing is not schema.Packing.on and lengths > 16


WORTH_SAYING_FRAC = 0.1
"""Smallest reported fraction of waiting. Smaller gains are within the spread of step times."""

MIN_STEPS = 10
"""Smallest number of steady steps for a report of waiting, so that one slow step is not enough."""


def waiting_hints(plan: Plan, timing: Timing) -> list[str]:
    """Return a warning with an override if waiting for data took a large part of the time."""
    waited, steps = timing.data_frac, timing.steady_step_s
    if waited is None or steps is None or steps.n < MIN_STEPS or waited < WORTH_SAYING_FRAC:
        return []
    workers, cores = plan.config.dataloader.workers, usable_cores() // plan.processes_per_node
    fix = f" ({cores} cores are too few for more than {workers} loader processes)"
    if 2 * workers <= cores:
        fix = f" (dataloader.workers={2 * workers})"
    if workers == 0:
        fix = " (dataloader=workers)"
    return [f"{waited:.0%} of the step time was spent waiting for data{fix}"]


_SWAPPED = "zero_stage_3"
"""Name of DeepSpeed's folder inside the configured folder."""


def swap_folder(plan: Plan, paths: RunPaths) -> Path | None:
    """Return the folder of offloaded files, unique to the run folder; None without files."""
    offload = plan.config.offload
    if plan.deepspeed is None or not isinstance(offload, schema.NvmeOffload):
        return None
    place = hashlib.sha256(str(paths.folder.absolute()).encode()).hexdigest()[:8]
    return user_path(offload.path).absolute() / f"eke-{paths.folder.name}-{place}"


def remove_swap(folder: Path | None, rank: int | None = None) -> None:
    """Remove the offloaded files of a rank, or of all ranks, and empty folders."""
    if folder is None:
        return
    for mine in folder.glob(f"{_SWAPPED}/*/rank{'*' if rank is None else rank}"):
        remove_tree(mine)
    for empty in (*folder.glob(f"{_SWAPPED}/*"), folder / _SWAPPED, folder):
        with suppress(OSError):  # not empty, or already removed by another rank
            empty.rmdir()


def swap_files(folder: Path, rank: int) -> dict[str, int]:
    """Return the bytes of a rank's offloaded files for `optimizer` and `weights`."""
    found = {"optimizer": 0, "weights": 0}
    for file in folder.glob(f"{_SWAPPED}/*/rank{rank}/*.swp"):
        kind = "optimizer" if file.parents[1].name == "optimizer" else "weights"
        with suppress(OSError):
            found[kind] += file.stat().st_size
    return found


def outline_record(
    plan: Plan, rows: Sequence[metrics.Row], attempt: int, outcome: Outcome, failure: Failure | None
) -> Record:
    """Return a record from plan and metrics.jsonl, without memory and other measurements."""
    content = plan_to_plain(plan)
    steps, timing = metrics.latest(rows, metrics.LOSS), metrics.timing(rows)
    best = metrics.best_evaluation(rows, plan.config.train.keep_best)
    judged = [
        r for r in rows if best is None or metrics.LOSS in r or r.get(metrics.STEP, 0) <= best.step
    ]
    return Record(
        run_id=plan.run_id,
        name=plan.name,
        outcome=outcome.value,
        exit_code=outcome.exit_code,
        attempt=attempt,
        steps_done=int(steps[-1][metrics.STEP]) if steps else 0,
        config=content.pop("config"),
        choices=dict(plan.choices),
        overrides=list(plan.overrides),
        plan=content,
        machine=dict(plan.machine),
        environment={},
        command=plan.command,
        timing=timing,
        throughput=metrics.throughput(
            rows,
            plan.size.flops_per_token,
            plan.size.flops_formula,
            plan.batch.world_size * plan.batch.devices,
            plan.device.peak(_format(plan)),
            plan.size.flops_per_sample,
        ),
        loss=metrics.losses(judged),
        best=best,
        metrics=metrics.last_evaluation(judged),
        sources=metrics.of_sources(judged, source_sizes(plan)),
        warnings=[*plan.warnings, *waiting_hints(plan, timing)],
        failure=failure,
        shared_device=any(metrics.SHARED in row for row in steps) or None,
    )


def _format(plan: Plan) -> str:
    """Return the format whose datasheet peak is the reference for MFU."""
    if plan.compute.float8 != "off":
        return "float8"
    tf32 = plan.compute.tf32 and plan.compute.matmul == "float32"
    return "tf32" if tf32 else plan.compute.matmul
