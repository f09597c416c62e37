"""Rules about the device a run is planned for."""

import shutil

from eke.check.rule import Facts, Rule, Verdict
from eke.schema import Compute, Switch
from eke.sizes import FLOAT32_BYTES, model_size, state_bytes
from eke.units import format_bytes, format_count

TF32_CAPABILITY = (8, 0)
BF16_CAPABILITY = (8, 0)
INDUCTOR_CAPABILITY = (7, 0)


def _capability(facts: Facts) -> str:
    device = facts.device
    if device.capability is None:
        return f"{device.name} is a CPU"
    major, minor = device.capability
    return f"{device.name} has compute capability {major}.{minor}"


def _older_than(facts: Facts, needed: tuple[int, int]) -> bool:
    return facts.device.kind == "cuda" and (facts.device.capability or (0, 0)) < needed


def _no_compiler(facts: Facts) -> bool:
    return (
        facts.config.compile.option == "inductor"
        and facts.device.kind == "cpu"
        and not facts.planning
        and not any(shutil.which(name) for name in ("g++", "clang++", "c++"))
    )


def _state(facts: Facts) -> int:
    return state_bytes(facts.config, model_size(facts.config)).total


def _state_reason(facts: Facts) -> str:
    size = model_size(facts.config)
    state = state_bytes(facts.config, size)
    return (
        f"{format_count(size.num_parameters)} parameters need {format_bytes(state.total)} for "
        f"weights ({format_bytes(state.weights)}), gradients ({format_bytes(state.gradients)}) and "
        f"optimizer state ({format_bytes(state.optimizer)}) alone; {facts.device.name} has "
        f"{format_bytes(facts.device.memory_bytes or 0)}"
    )


def _state_fix(facts: Facts) -> str:
    leaner = state_bytes(facts.config, model_size(facts.config))
    without_states = leaner.weights + leaner.gradients
    if (
        facts.config.optimizer.option.startswith("adamw")
        and facts.device.memory_bytes
        and without_states * 1.05 < facts.device.memory_bytes
    ):
        return "optimizer=adafactor"
    return f"model={'tiny' if facts.config.model.family == 'llama' else _small(facts)}"


def _embedded(facts: Facts) -> int:
    """Bytes of the first layer's input in one forward pass; autocast leaves it in float32."""
    config = facts.config
    tokens = config.batch.per_device * config.data.seq_len
    return tokens * config.model.hidden_size * FLOAT32_BYTES


def _batch_fix(facts: Facts) -> str:
    """The same samples in smaller pieces; where one sample is too long, a shorter one."""
    config = facts.config
    free = (facts.device.memory_bytes or 0) - _state(facts)
    samples = free * config.batch.per_device // _embedded(facts)
    if samples:
        return f"batch.per_device={1 << (samples.bit_length() - 1)}"
    tokens = free // (config.model.hidden_size * FLOAT32_BYTES)
    return f"batch.per_device=1 data.seq_len={max(4, tokens // 2)}"


def _small(facts: Facts) -> str:
    return f"tiny_{facts.config.model.family}"


PYTORCH_NOTES = "https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere"

RULES = (
    Rule(
        id="declared_device_is_absent",
        verdict=Verdict.impossible,
        path="hardware",
        when=lambda f: not f.planning and not f.device.present,
        value=lambda f: f.config.hardware.option,
        why=lambda f: f"this machine has no {f.device.name}; a declared device is for planning",
        fix=lambda f: "hardware=auto   (or add plan_only=true)",
        source="DESIGN section 5",
    ),
    Rule(
        id="tf32_needs_ampere",
        verdict=Verdict.impossible,
        path="precision",
        when=lambda f: (
            f.config.precision.tf32 is Switch.on
            and (f.device.kind == "cpu" or _older_than(f, TF32_CAPABILITY))
        ),
        value=lambda f: f.config.precision.option,
        why=lambda f: f"TF32 needs CUDA compute capability 8.0 or newer; {_capability(f)}",
        fix=lambda f: (
            "precision=fp32" if f.config.precision.option == "tf32" else "precision.tf32=auto"
        ),
        source=PYTORCH_NOTES,
    ),
    Rule(
        id="bf16_needs_ampere",
        verdict=Verdict.impossible,
        path="precision",
        when=lambda f: (
            f.config.precision.compute is Compute.bfloat16 and _older_than(f, BF16_CAPABILITY)
        ),
        value=lambda f: f.config.precision.option,
        why=lambda f: (
            f"bfloat16 matrix units need CUDA compute capability 8.0 or newer; {_capability(f)}"
        ),
        fix=lambda f: "precision=fp16",
        source="https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities",
    ),
    Rule(
        id="inductor_needs_volta",
        verdict=Verdict.impossible,
        path="compile",
        when=lambda f: (
            f.config.compile.option == "inductor" and _older_than(f, INDUCTOR_CAPABILITY)
        ),
        value=lambda f: f.config.compile.option,
        why=lambda f: f"Triton kernels need CUDA compute capability 7.0 or newer; {_capability(f)}",
        fix=lambda f: "compile=none",
        source="https://docs.pytorch.org/docs/stable/torch.compiler.html",
    ),
    Rule(
        id="inductor_needs_compiler",
        verdict=Verdict.impossible,
        path="compile",
        when=_no_compiler,
        value=lambda f: f.config.compile.option,
        why=lambda f: "no C++ compiler was found, and on a CPU inductor generates C++",
        fix=lambda f: "compile=none   (or: apt install g++)",
        source="https://docs.pytorch.org/docs/stable/torch.compiler.html",
    ),
    Rule(
        id="pinning_needs_cuda",
        verdict=Verdict.no_effect,
        path="dataloader.pin_memory",
        when=lambda f: f.config.dataloader.pin_memory is Switch.on and f.device.kind == "cpu",
        value=lambda f: f.config.dataloader.pin_memory.value,
        why=lambda f: "page-locked memory speeds up copies to a GPU; there is none",
        fix=lambda f: "dataloader.pin_memory=auto",
        source="https://docs.pytorch.org/docs/stable/data.html#memory-pinning",
    ),
    Rule(
        id="one_process_without_strategy",
        verdict=Verdict.impossible,
        path="distributed.num_processes",
        when=lambda f: (
            f.config.distributed.option == "none" and f.config.distributed.num_processes > 1
        ),
        value=lambda f: f.config.distributed.num_processes,
        why=lambda f: "distributed=none trains in one process",
        fix=lambda f: "distributed.num_processes=1",
        source="DESIGN section 5",
    ),
    Rule(
        id="more_processes_than_devices",
        verdict=Verdict.impossible,
        path="distributed.num_processes",
        when=lambda f: (
            f.config.distributed.option != "none"
            and f.device.kind == "cuda"
            and f.config.distributed.num_processes > f.device.count
        ),
        value=lambda f: f.config.distributed.num_processes,
        why=lambda f: f"one process takes one device; there are {f.device.count}",
        fix=lambda f: f"distributed.num_processes={f.device.count}",
        source="DESIGN section 5",
    ),
    Rule(
        id="states_do_not_fit",
        verdict=Verdict.impossible,
        path="model",
        when=lambda f: f.device.memory_bytes is not None and _state(f) > f.device.memory_bytes,
        value=lambda f: f.config.model.option,
        why=_state_reason,
        fix=_state_fix,
        source="a lower bound: activations come on top",
        sized=True,
    ),
    Rule(
        id="batch_does_not_fit",
        verdict=Verdict.impossible,
        path="batch.per_device",
        when=lambda f: (
            f.device.memory_bytes is not None
            and _state(f) <= f.device.memory_bytes < _state(f) + _embedded(f)
        ),
        value=lambda f: f.config.batch.per_device,
        why=lambda f: (
            f"samples of {f.config.data.seq_len} tokens need {format_bytes(_embedded(f))} for "
            f"their embeddings alone, on top of {format_bytes(_state(f))} for weights, gradients "
            f"and optimizer state; {f.device.name} has {format_bytes(f.device.memory_bytes or 0)}"
        ),
        fix=_batch_fix,
        source="a lower bound: one float32 vector per token, kept for the backward pass",
        sized=True,
    ),
)
