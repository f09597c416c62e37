"""Rules about DeepSpeed: ZeRO stages, what they need and what they forbid."""

import re
import shutil
from importlib.metadata import PackageNotFoundError, version

from eke.common.units import format_bytes
from eke.config.schema import Checkpointing, Switch
from eke.models.sizes import STAGE, describe, state_bytes
from eke.models.sizes.optimizer_descriptions import AUTO, PIECES
from eke.rules.precision import is_narrow
from eke.rules.rule import Facts, Rule, Verdict

RECOMPUTES_FROZEN = (0, 19, 3)
"""DeepSpeed from which frozen weights can be recomputed under ZeRO-3; 0.19.2 fails.
Source: https://github.com/deepspeedai/DeepSpeed/pull/8148"""

VERSION = "deepspeed 0.19.8"

ROOMY_FRAC = 0.5
"""Share of the device's memory below which the training state leaves room for a small batch."""


def is_zero(facts: Facts) -> bool:
    """Whether DeepSpeed shares the model out."""
    return facts.config.distributed.option in STAGE


def offloads(facts: Facts) -> bool:
    """Whether something is to live outside the device's memory."""
    return facts.config.offload.option != "none"


def _whole(facts: Facts) -> int:
    """Bytes of the training state in one process without DeepSpeed."""
    return state_bytes(facts.config).total


def _plain(facts: Facts) -> str:
    """The override for the same processes without DeepSpeed."""
    alone = facts.config.distributed.num_processes == 1
    return "distributed=none" if alone else "distributed=ddp"


def _without_offload(facts: Facts) -> str:
    return f"{_plain(facts)} offload=none" if offloads(facts) else _plain(facts)


def _compiles_adam(facts: Facts) -> bool:
    """Whether the plan's choice is DeepSpeed's AdamW for the host."""
    chosen = describe(facts.config.optimizer).implementation == AUTO
    return is_zero(facts) and offloads(facts) and chosen


def _installed() -> str:
    """Version of the package; the tested one where there is none."""
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return VERSION.split()[1]


def _loses_frozen_weights(facts: Facts) -> bool:
    config = facts.config
    frozen = config.distributed.option == "zero3" and config.peft.option != "none"
    if facts.planning or not frozen or config.memory.checkpointing is Checkpointing.off:
        return False
    numbers = [int(n) for n in re.findall(r"\d+", _installed())[:3]]
    return tuple(numbers) < RECOMPUTES_FROZEN


RULES = (
    Rule(
        id="zero_needs_elementwise_optimizer",
        verdict=Verdict.impossible,
        path="optimizer",
        when=lambda f: is_zero(f) and describe(f.config.optimizer).fails_on_pieces != "",
        value=lambda f: f.config.optimizer.option,
        why=lambda f: (
            f"under distributed={f.config.distributed.option}: "
            f"{describe(f.config.optimizer).fails_on_pieces}"
        ),
        fix=lambda f: "optimizer=adamw",
        source="arXiv:1910.02054, section 5; docs/design/deepspeed.md",
        versions=VERSION,
    ),
    Rule(
        id="zero_keeps_masters",
        verdict=Verdict.impossible,
        path="precision.master",
        when=lambda f: is_zero(f) and is_narrow(f) and f.config.precision.master is Switch.off,
        value=lambda f: f.config.precision.master.value,
        why=lambda f: (
            f"distributed={f.config.distributed.option} steps on float32 copies of its share of "
            "bfloat16 weights"
        ),
        fix=lambda f: "precision.master=auto",
        source="docs/design/deepspeed.md",
        versions=VERSION,
    ),
    Rule(
        id="zero_rounds_adapters",
        verdict=Verdict.impossible,
        path="precision.weights",
        when=lambda f: is_zero(f) and is_narrow(f) and f.config.peft.option != "none",
        value=lambda f: f.config.precision.weights.value,
        why=lambda f: (
            "DeepSpeed would make adapters bfloat16, too, which are float32 everywhere else"
        ),
        fix=lambda f: (
            "precision=bf16"
            if f.config.precision.option == "bf16_pure"
            else "precision.weights=float32"
        ),
        source="deepspeed.runtime.engine, _cast_module_mixed_precision",
        versions=VERSION,
    ),
    Rule(
        id="zero3_recomputes_frozen_weights",
        verdict=Verdict.impossible,
        path="memory.checkpointing",
        when=_loses_frozen_weights,
        value=lambda f: f.config.memory.checkpointing.value,
        why=lambda f: (
            f"DeepSpeed {_installed()} empties frozen weights while they are recomputed; "
            f"{'.'.join(map(str, RECOMPUTES_FROZEN))} does not"
        ),
        fix=lambda f: (
            "memory.checkpointing=off   (or: pip install -U deepspeed; distributed=zero2)"
        ),
        source="https://github.com/huggingface/transformers/issues/47254",
        versions="deepspeed before 0.19.3",
    ),
    Rule(
        id="zero_with_compile",
        verdict=Verdict.impossible,
        path="compile",
        when=lambda f: is_zero(f) and f.config.compile.option != "none",
        value=lambda f: f.config.compile.option,
        why=lambda f: "DeepSpeed's engine would run the model as it is, uncompiled",
        fix=lambda f: "compile=none",
        source="docs/design/deepspeed.md",
        versions=VERSION,
    ),
    Rule(
        id="zero_of_one",
        verdict=Verdict.no_benefit,
        path="distributed",
        when=lambda f: is_zero(f) and f.config.distributed.num_processes == 1 and not offloads(f),
        value=lambda f: f.config.distributed.option,
        why=lambda f: (
            "one process has nobody to share with, and DeepSpeed keeps a float32 copy of the "
            "weights, 4 bytes a parameter more than distributed=none"
        ),
        fix=lambda f: "distributed=none   (or: offload=optimizer_cpu)",
        source="arXiv:1910.02054, section 5",
    ),
    Rule(
        id="deepspeed_not_needed",
        verdict=Verdict.no_benefit,
        path="distributed",
        when=lambda f: (
            is_zero(f)
            and f.device.kind == "cuda"
            and f.device.memory_bytes is not None
            and _whole(f) < ROOMY_FRAC * f.device.memory_bytes
        ),
        value=lambda f: f.config.distributed.option,
        why=lambda f: (
            f"the whole training state is {format_bytes(_whole(f))}; one {f.device.name} has "
            f"{format_bytes(f.device.memory_bytes or 0)}: what fits on one GPU only gets slower"
        ),
        fix=_without_offload,
        source="https://huggingface.co/docs/transformers/v4.25.1/en/perf_train_gpu_one#deepspeed-zero",
        sized=True,
    ),
    Rule(
        id="zero_knows_no_embeddings",
        verdict=Verdict.no_effect,
        path="optimizer.embeddings_32bit",
        when=lambda f: (
            STAGE.get(f.config.distributed.option) in (1, 2)
            and f.config.offload.option == "none"
            and bool(getattr(f.config.optimizer, "embeddings_32bit", False))
        ),
        value=lambda f: "true",
        why=lambda f: f"{PIECES}, none of which is known as an embedding: all moments have 8 bits",
        fix=lambda f: "optimizer.embeddings_32bit=false   (says what happens; or distributed=ddp)",
        source="https://huggingface.co/docs/bitsandbytes/optimizers",
        versions=VERSION,
    ),
    Rule(
        id="ds_config_without_zero",
        verdict=Verdict.no_effect,
        path="distributed.deepspeed_config",
        when=lambda f: f.config.distributed.deepspeed_config is not None and not is_zero(f),
        value=lambda f: f.config.distributed.deepspeed_config,
        why=lambda f: f"distributed={f.config.distributed.option} does not use DeepSpeed",
        fix=lambda f: "distributed.deepspeed_config=null   (or: distributed=zero2)",
        source="https://www.deepspeed.ai/docs/config-json",
    ),
    Rule(
        id="cpu_adam_needs_compiler",
        verdict=Verdict.impossible,
        path="optimizer",
        when=lambda f: not f.planning and _compiles_adam(f) and shutil.which("g++") is None,
        value=lambda f: f.config.optimizer.option,
        why=lambda f: "DeepSpeed compiles its Adam for the host at first use; there is no g++ here",
        fix=lambda f: "optimizer=adamw_fused   (torch's own; or install g++)",
        source="https://www.deepspeed.ai/tutorials/advanced-install",
        versions=VERSION,
    ),
)
