"""Effective options, read from running objects, with a warning if one had no effect."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.optim import Optimizer

from eke.config.schema import Checkpointing, QLora
from eke.models.sizes import fuses_adapters, is_ia3, optimizer_entry
from eke.models.sizes.optimizers import AUTO
from eke.plan.planner import Plan
from eke.training.distributed import deepspeed_engine
from eke.training.distributed.deepspeed_engine import DeepSpeedUpdate, shard_lengths
from eke.training.loop.training_state import TrainingState
from eke.training.model.activation_offload import ActivationOffload
from eke.training.model.adapters import float8_layers, is_adapted, quant_states, quant_tensors
from eke.training.model.attention_kernels import KernelProbe
from eke.training.model.checkpointing import KEPT, count_layer_calls
from eke.training.model.number_formats import master_bytes, num_graphs, optimized_weights
from eke.training.observe.memory_stages import AllocationProfile, live_bytes, storage_bytes
from eke.training.observe.record_settings import LIBRARY_NOTES, note_kernels, note_packing
from eke.training.optimizer.build_optimizer import is_quantised, num_paged_bytes, state_tensors
from eke.training.optimizer.builders import projected_parameters


def _note_adapters(job: TrainingState) -> None:
    """Record trained and frozen weights, if any are frozen."""
    wanted = job.plan.config.peft.option
    found = _adapter_sizes(job.bare_model)
    if wanted == "none" and not found:
        return
    job.effective["peft"] = found
    method, modules = _method(found), found.get("adapted_modules", 0)
    if method != _planned_method(job.plan):
        has = f"the model has {method}, with {modules} adapted modules"
        job.warn(f"peft={wanted} did not take effect: {has}")
    left = modules - found.get("fused_modules", 0)
    if left and fuses_adapters(job.plan.config):
        job.warn(f"peft.fused=true: {left} adapted modules use PEFT's own forward pass")
    weights = optimized_weights(job.optimizer)
    if isinstance(job.update, DeepSpeedUpdate):  # its optimizer has flat shards of the weights
        weights = deepspeed_engine.engine_weights(job.update.engine)
    held = {id(p) for p in weights}
    still = [name for name, p in _trained(job.bare_model) if id(p) not in held]
    if still:
        job.warn(f"peft={wanted}: {len(still)} adapters are not in the optimizer: {still[0]}")


def _adapter_sizes(model: Any) -> dict[str, Any]:
    """Return counts and bytes of adapters read from the modules, {} without adapters."""
    if not is_adapted(model):
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    states = quant_states(model)
    trained = sum(_numbers(p) for _, p in _trained(model))
    frozen = [p for p in model.parameters() if not p.requires_grad]
    # 4-bit weights are stored in bytes. Their states contain the number of elements.
    numbers = trained + sum(_numbers(p) for p in frozen if p.is_floating_point())
    numbers += sum(state.shape.numel() for state in states)
    return {
        "type": model.peft_config["default"].peft_type.value.lower(),
        "adapted_modules": len(layers),
        "fused_modules": sum("forward" in vars(m) for m in layers),
        "magnitude_vectors": sum(bool(getattr(m, "lora_magnitude_vector", ())) for m in layers),
        "trained_parameters": trained,
        "trained_frac": trained / max(1, numbers),
        "four_bit_tensors": len(states),
        "four_bit_type": ", ".join(sorted({state.quant_type for state in states})),
        "double_quantised": sum(bool(state.nested) for state in states),
        "frozen_weight_bytes": storage_bytes(
            getattr(tensor, "ds_tensor", tensor) for tensor in (*frozen, *quant_tensors(model))
        ),
    }


def _method(found: dict[str, Any]) -> str:
    if not found or not found["adapted_modules"]:
        return "none"
    if found["magnitude_vectors"]:
        return "dora"
    four_bit = found["type"] == "lora" and found["four_bit_tensors"]
    return "qlora" if four_bit else str(found["type"])


def _planned_method(plan: Plan) -> str:
    """Return what `_method` finds if the option of `peft` took effect."""
    if plan.config.peft.is_dora or not plan.config.peft.is_on:
        return plan.config.peft.option
    if is_ia3(plan.config):
        return "ia3"
    return "qlora" if isinstance(plan.config.peft, QLora) else "lora"


def _numbers(weight: nn.Parameter) -> int:
    """Return the size of the full weight. DeepSpeed's ZeRO-3 leaves empty weights."""
    return int(getattr(weight, "ds_numel", weight.numel()))


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _note_formats(job: TrainingState) -> None:
    """Record weights, float32 copies and float8 layers, after the first full steps."""
    compute = job.plan.compute
    # The base model's weights. Adapters can have a wider format.
    dtypes = _dtypes(job.bare_model.parameters())
    if compute.frozen not in dtypes:
        key = "peft.base_weights" if is_adapted(job.bare_model) else "precision.weights"
        job.warn(f"{key}={compute.frozen} had no effect: weights are {', '.join(dtypes)}")
    if job.plan.config.model.freeze:
        frozen = [p for p in job.bare_model.parameters() if not p.requires_grad]
        job.effective["frozen_parameters"] = sum(map(_numbers, frozen))
        job.effective["frozen_dtypes"] = _dtypes(frozen)
    copies = master_bytes(job.bare_model, job.optimizer)
    if isinstance(job.update, DeepSpeedUpdate):  # ZeRO-3 hides the copies from its optimizer
        copies = torch.float32.itemsize * sum(shard_lengths(job.update.engine))
    if copies or compute.master:
        job.effective["master_bytes"] = copies
    if compute.master and not copies:
        job.warn("precision.master=on had no effect: the optimizer has no float32 copies")
    if compute.float8 == "off":
        return
    layers = float8_layers(job.bare_model)
    total = sum(isinstance(module, nn.Linear) for module in job.bare_model.modules())
    job.effective["float8_layers"] = len(layers)
    job.effective["linear_layers"] = total
    job.effective["float8_emulated"] = any(layer.config.emulate for layer in layers)
    if not layers:
        none = f"0 of {total} linear layers could be converted"
        job.warn(f"precision.float8={compute.float8} had no effect: {none}")


def _dtypes(weights: Iterable[nn.Parameter]) -> list[str]:
    return sorted({str(p.dtype).removeprefix("torch.") for p in weights})


def note_states(job: TrainingState) -> None:
    """Record formats of weights and the optimizer's state, after the first full steps."""
    job.effective["weight_dtypes"] = _dtypes(job.parameters)
    found = _describe_states(job.optimizer, job.parameters)
    job.effective |= found
    option, known = job.plan.config.optimizer.option, optimizer_entry(job.plan.config.optimizer)
    built = f"{found['optimizer']} {found['optimizer_library']}"
    loop = found["optimizer_implementation"]
    if known.built and built not in known.built:
        job.warn(f"optimizer={option} had no effect: it is {found['optimizer']}")
    elif known.implementation not in ("", AUTO, loop):
        job.warn(f"optimizer={option} had no effect: the implementation is {loop or 'its own'}")
    for wanted, key, what in (
        (known.quantises is not None, "optimizer_quantised_frac", "the state is not quantised"),
        (known.projects, "optimizer_projected_frac", "the state is not projected"),
        (known.pages, "optimizer_paged_bytes", "the state is not paged"),
        (known.stochastic_rounding, "optimizer_stochastic_rounding", "rounding is not random"),
    ):
        if wanted and not found[key]:
            job.warn(f"optimizer={option} had no effect: {what}")


def _describe_states(optimizer: Optimizer, parameters: list[torch.nn.Parameter]) -> dict[str, Any]:
    """Return class, state bytes and fractions of `parameters`, read from the optimizer."""
    count = sum(map(_numbers, parameters))
    num_bytes = sum(t.numel() * t.element_size() for t in state_tensors(optimizer))
    quantised = [p for p, state in optimizer.state.items() if is_quantised(state)]
    parts: Sequence[Optimizer] = getattr(optimizer, "parts", (optimizer,))
    # torchao's optimizers round only bfloat16 weights at random.
    rounds = bool(getattr(optimizer, "bf16_stochastic_round", False))
    return {
        "optimizer": "+".join(type(each).__name__ for each in parts),
        "optimizer_library": type(parts[0]).__module__.partition(".")[0],
        "optimizer_implementation": _implementation(optimizer),
        "optimizer_state_bytes": num_bytes,
        "optimizer_bytes_per_parameter": num_bytes / count,
        "optimizer_parameters": [
            sum(p.numel() for group in each.param_groups for p in group["params"]) for each in parts
        ],
        "optimizer_quantised_frac": sum(p.numel() for p in quantised) / count,
        "optimizer_projected_frac": sum(p.numel() for p in projected_parameters(optimizer)) / count,
        "optimizer_paged_bytes": num_paged_bytes(optimizer),
        "optimizer_stochastic_rounding": rounds
        and any(p.dtype is torch.bfloat16 for p in parameters),
    }


def _implementation(optimizer: torch.optim.Optimizer) -> str:
    group: dict[str, Any] = optimizer.param_groups[-1]
    default = "forloop" if "foreach" in group else ""
    return next((name for name in ("fused", "foreach") if group.get(name)), default)


def _note_recomputation(job: TrainingState, calls: list[int], seen: KernelProbe, num: int) -> None:
    """Record the operations that the first step, of `num` micro-batches, repeated."""
    memory = job.plan.config.memory
    recomputed, wanted = sum(count > num for count in calls), 0
    dear = sum(seen.repeated[name] for name in KEPT)
    if memory.checkpointing is not Checkpointing.off:
        wanted = len(range(0, len(calls), memory.every_n))
    job.effective["layer_calls_per_micro_batch"] = sum(calls) / max(1, len(calls)) / num
    job.effective["layers_recomputed"] = recomputed
    job.effective["operations_recomputed_per_micro_batch"] = seen.repeated.total() / num
    job.effective["matmuls_recomputed_per_micro_batch"] = dear / num
    if recomputed < wanted and not recomputed:
        job.warn("memory.checkpointing had no effect: no layer's forward pass was repeated")
    elif recomputed != wanted:
        job.warn(f"memory.checkpointing repeated {recomputed} layers instead of {wanted}")
    elif memory.checkpointing is Checkpointing.selective and dear:
        repeated = f"{dear} matrix multiplications and attention kernels"
        job.warn(f"memory.checkpointing=selective repeated {repeated} that it should have kept")
    elif memory.checkpointing is Checkpointing.full and not dear:
        job.warn("memory.checkpointing=full repeated no matrix multiplication")


@contextmanager
def _count_optimizer_calls(job: TrainingState) -> Iterator[None]:
    phases: list[str] = []
    with job.optimizer.register_step_post_hook(lambda *_: phases.append(job.meter.phase)):
        yield
    job.effective["optimizer_steps_in_backward"] = phases.count("backward")
    if job.plan.config.memory.optimizer_in_backward and "backward" not in phases:
        none = "all weights were updated after the backward pass"
        job.warn(f"memory.optimizer_in_backward had no effect: {none}")


def _note_offload(job: TrainingState) -> None:
    """Record the bytes that have left the device by the end of the second step."""
    if not job.plan.config.memory.activation_offload:
        return
    moved = job.offload.bytes_moved if isinstance(job.offload, ActivationOffload) else 0
    job.effective["activation_bytes_offloaded"] = moved
    if not moved and job.device.type != "cpu":
        job.warn("memory.activation_offload had no effect: 0 bytes were moved to the host")


def _note_cache_release(job: TrainingState) -> None:
    """Record how often the allocator was emptied in the entire attempt."""
    if job.plan.config.memory.empty_cache_every is None:
        return
    calls = job.effective["empty_cache_calls"] = job.cache_release.calls
    if not calls and job.device.type != "cpu":
        job.warn("memory.empty_cache_every had no effect: the allocator was not emptied")


_AFTER_WARM_UP = (note_states, _note_formats, _note_adapters, _note_offload, *LIBRARY_NOTES)
"""Notes taken once, after the second step, when gradients and optimizer state exist."""

AT_THE_END: tuple[Callable[[TrainingState], None], ...] = (_note_cache_release, note_packing)
"""Notes taken once after training, also after a failure."""


@contextmanager
def profile_step(job: TrainingState, nth: int) -> Iterator[None]:
    """Observe the nth step: kernels in the first, CPU memory in one later.

    Observed steps are excluded from timings. For their cost see notes/lab/memory.md.
    """
    graphs = num_graphs(job.plan)
    if nth == 1 and job.device.type == "cpu":
        job.longest = job.data.longest_step(job.start_step + 1) - job.start_step
    # One profile per run: PyTorch's profiler miscounts addresses from an earlier profile.
    profiled = nth == job.longest
    if nth == 0:
        with _count_optimizer_calls(job), _look_at_operations(job):
            yield
    elif profiled:
        others = [*job.update.held(), *job.formats.held]
        alive = live_bytes(job.bare_model, job.optimizer, others)
        with AllocationProfile(alive) as profile, _cut_by_micro_batch(job, profile):
            yield
        job.profiled_peak, job.profiled = profile.peak, job.largest
        if profile.problem:
            job.warn(f"peak memory of tensors was not measured: {profile.problem}")
    else:
        yield
    job.meter.notes[-1].unsteady |= num_graphs(job.plan) != graphs or profiled
    if nth == 1:
        for note in _AFTER_WARM_UP:
            note(job)
    if nth < 2 or profiled:  # exclude the time of these notes from the next step
        job.meter.leave(job.meter.phase)


def _cut_by_micro_batch(job: TrainingState, profile: AllocationProfile) -> Any:
    """Return a context that profiles each micro-batch separately."""
    # Exchanges free memory in other threads, also between two parts: for FSDP2 on two ranks the
    # result was 20 % too high.
    if job.plan.batch.world_size > 1 and not profile.is_complete:
        return nullcontext()
    count = 0

    def watch(phase: str) -> None:
        nonlocal count
        count += phase == "forward"
        if phase == "forward" and count > 1:
            profile.cut()

    return patch.object(job.meter, "watcher", watch)


@contextmanager
def look_at_evaluation(job: TrainingState) -> Iterator[None]:
    """Observe the first evaluation batch of an attempt."""
    watchable = not job.plan.config.compile.is_on and job.plan.batch.devices == 1
    if not watchable or "eval_matmul_dtypes" in job.effective:
        yield
        return
    with KernelProbe() as probe:
        yield
    dtypes, compute = probe.matmul_dtypes, job.plan.compute
    job.effective["eval_matmul_dtypes"] = dtypes
    wanted = compute.eval_autocast or compute.weights
    if wanted not in dtypes:
        ran = f"matrix multiplications ran in {', '.join(dtypes) or 'no format'}"
        job.warn(f"precision.evaluation={wanted} had no effect: {ran}")


@contextmanager
def _look_at_operations(job: TrainingState) -> Iterator[None]:
    """Observe formats and kernels, and recomputation without a compiler, which ignores hooks."""
    compiler = job.plan.config.compile.option
    if job.plan.batch.devices > 1:
        job.effective["not_looked_into"] = "formats, kernels: DataParallel runs in other threads"
        yield
        return
    counted = count_layer_calls(job.bare_model) if compiler == "none" else nullcontext()
    with KernelProbe() as kernels, counted as calls:
        yield
    note_kernels(job, kernels)
    if calls is None:
        # Probes detect kernel calls in compiled code, but not fused or recomputed operations.
        job.effective["not_looked_into"] = f"recomputation, fused kernels: compile={compiler}"
        return
    num_micro_batches = sum(phase == "forward" for phase, _ in job.meter.notes[-1].stamps)
    _note_recomputation(job, calls, kernels, num_micro_batches)
