"""Rules about the device of the plan and about missing packages."""

from importlib.util import find_spec
from pathlib import Path

from eke.common.errors import Fix
from eke.common.text import format_bytes, format_count
from eke.config.schema import AutoBool, PretrainedModel
from eke.models.sizes import OPTIMIZER_REGISTRY, STAGE, decide_formats, model_size, option_of
from eke.rules.memory import copies, first_that_fits, held_bytes, per_process_bytes
from eke.rules.rule import Rule, RuleInputs, without_effect


def _state_reason(facts: RuleInputs) -> str:
    state, number, device = per_process_bytes(facts), copies(facts), facts.device
    count = f"{format_count(model_size(facts.config).num_parameters)} parameters"
    memory = f". {device.name} has {format_bytes(device.memory_bytes or 0)}"
    if state.start > state.total:
        several = f"in each of {number} processes" if number > 1 else "while they are loaded"
        return f"{count} need {format_bytes(state.start)} {several}{memory}"
    return (
        f"{count} need {format_bytes(state.total)} for "
        f"weights ({format_bytes(state.weights)}), gradients ({format_bytes(state.gradients)})"
        f"{f', float32 copies ({format_bytes(state.master)})' if state.master else ''} and "
        f"optimizer state ({format_bytes(state.optimizer)})"
        + (f" in each of {number} processes" if number > 1 else "")
        + memory
    )


def _embedded(facts: RuleInputs) -> int:
    """Return the bytes of the first layer's input in one forward pass."""
    config = facts.config
    tokens = config.batch.micro_batch * config.data.seq_len
    return tokens * config.model.hidden_size * decide_formats(config).stream_bytes


def _batch_fix(facts: RuleInputs) -> Fix:
    """Return a smaller micro-batch, or a shorter sample if one sample is too large."""
    config = facts.config
    free = (facts.device.memory_bytes or 0) - held_bytes(facts)
    samples = free * config.batch.micro_batch // _embedded(facts)
    if samples:
        return Fix(f"batch.per_device={1 << (samples.bit_length() - 1)}")
    tokens = free // (config.model.hidden_size * decide_formats(config).stream_bytes)
    return Fix("batch.per_device=1", f"data.seq_len={max(4, tokens // 2)}")


def _small(facts: RuleInputs) -> Fix:
    if isinstance(facts.config.model, PretrainedModel):
        return Fix("model.name_or_path=A_SMALLER_CHECKPOINT")
    return Fix(f"model={facts.model_family.smallest}")


RULES = dict(
    declared_device_is_absent=Rule(
        key="hardware",
        when=lambda f: not f.planning and not f.device.present,
        why=lambda f: f"this machine has no {f.device.name}. A declared device is for plans",
        fix=Fix("hardware=auto", remark="or add plan_only=true"),
        source="docs/how-to/forecast.md",
    ),
    pinning_needs_cuda=without_effect(
        key="dataloader.pin_memory",
        when=lambda f: f.config.dataloader.pin_memory is AutoBool.on and f.on_cpu,
        why="page-locked memory speeds up copies to a GPU. This run uses a CPU",
        source="https://docs.pytorch.org/docs/stable/data.html#memory-pinning",
    ),
    states_do_not_fit=Rule(
        key="model",
        when=lambda f: f.device.memory_bytes is not None and held_bytes(f) > f.device.memory_bytes,
        why=_state_reason,
        fix=lambda f: first_that_fits(f) or _small(f),
        source="a lower bound without activations",
        sized=True,
    ),
    batch_does_not_fit=Rule(
        key="batch.per_device",
        when=lambda f: (
            f.device.memory_bytes is not None
            and held_bytes(f) <= f.device.memory_bytes < held_bytes(f) + _embedded(f)
        ),
        value=lambda f: f.config.batch.micro_batch,
        why=lambda f: (
            f"the embeddings of {f.data.seq_len}-token samples need {format_bytes(_embedded(f))}, "
            f"weights, gradients and optimizer state {format_bytes(held_bytes(f))}. "
            f"{f.device.name} has {format_bytes(f.device.memory_bytes or 0)}"
        ),
        fix=_batch_fix,
        source="a lower bound: one vector per token, kept for the backward pass",
        sized=True,
    ),
)

NEEDS: dict[tuple[str, str], tuple[str, str]] = {
    ("tracker", "wandb"): ("wandb", "pip install wandb"),
    ("tracker", "tensorboard"): ("tensorboard", 'pip install "eke[tensorboard]"'),
    ("tracker", "mlflow"): ("mlflow", 'pip install "eke[mlflow]"'),
    ("tracker", "trackio"): ("trackio", 'pip install "eke[trackio]"'),
    **{
        ("optimizer", option): (entry.package, entry.install)
        for option, entry in OPTIMIZER_REGISTRY.items()
        if entry.package
    },
    ("attention", "flash2"): ("flash_attn", "pip install flash-attn --no-build-isolation"),
    ("attention", "flash3"): (
        "flash_attn_interface",
        "pip install -v . in the folder hopper of github.com/Dao-AILab/flash-attention",
    ),
    ("kernels", "liger"): ("liger_kernel", 'pip install "eke[liger]"'),
    **{("peft", option): ("peft", 'pip install "eke[peft]"') for option in ("lora", "dora", "ia3")},
    ("peft", "qlora"): ("peft bitsandbytes", 'pip install "eke[peft,bitsandbytes]"'),
    **{("distributed", zero): ("deepspeed", 'pip install "eke[deepspeed]"') for zero in STAGE},
}
"""Group and option -> the required packages, and the command that installs them."""

_INSTEAD = {
    "tracker": "none",
    "optimizer": "adamw",
    "attention": "sdpa",
    "kernels": "none",
    "distributed": "ddp",
    "peft": "none",
}
"""Group -> an option without extra packages."""


def _is_importable(package: str) -> bool:
    """Return whether `a.b` can be imported, without the slow import of `a`."""
    top, *inner = package.split(".")
    spec = find_spec(top)
    if spec is None or not inner:
        return spec is not None
    places = [Path(place, *inner) for place in spec.submodule_search_locations or ()]
    return any(path.is_dir() or path.with_suffix(".py").is_file() for path in places)


def _option(facts: RuleInputs, group: str) -> str:
    config = facts.config
    return option_of(config.optimizer) if group == "optimizer" else getattr(config, group).option


def _missing(facts: RuleInputs, group: str) -> tuple[str, str]:
    """Return the option's first missing package and its install command, or empty strings."""
    packages, line = NEEDS.get((group, _option(facts, group)), ("", ""))
    return next(((name, line) for name in packages.split() if not _is_importable(name)), ("", ""))


def _without(facts: RuleInputs, group: str) -> str:
    if getattr(facts.config, group).option == _INSTEAD[group]:  # the implementation needs it
        return f"{group}.implementation=auto"
    return f"{group}={_INSTEAD[group]}"


def _rule(group: str) -> Rule:
    return Rule(
        id="package_missing",
        key=group,
        when=lambda f: not f.planning and _missing(f, group) != ("", ""),
        value=lambda f: _option(f, group),
        why=lambda f: f"the package {_missing(f, group)[0]} is not installed",
        fix=lambda f: Fix(_without(f, group), remark=f"or: {_missing(f, group)[1]}"),
        source="pyproject.toml",
    )


PACKAGE_RULES = tuple(_rule(group) for group in _INSTEAD)
