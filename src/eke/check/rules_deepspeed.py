"""Rules about DeepSpeed: ZeRO stages, what they need and what they forbid."""

import shutil

from eke.check.rule import Facts, Rule, Verdict
from eke.schema import Evaluation, Float8, Weights
from eke.sizes import STAGE, model_size, state_bytes
from eke.units import format_bytes

ELEMENTWISE = ("adamw", "adamw_forloop", "adamw_foreach", "adamw_fused", "sgd")
"""Optimizers that treat every number alike, and gave the same curve under ZeRO as without it."""

WHY_NOT = {
    "adafactor": (
        "keeps a row and a column of statistics for each matrix; ZeRO hands it flat pieces, and it "
        "silently becomes another algorithm with 4 bytes a parameter"
    ),
    "muon": "orthogonalizes whole matrices; ZeRO hands it flat pieces",
}
"""Optimizer -> what happens; the others have not been compared."""

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
    return state_bytes(facts.config, model_size(facts.config)).total


def _plain(facts: Facts) -> str:
    """The override for the same processes without DeepSpeed."""
    alone = facts.config.distributed.num_processes == 1
    return "distributed=none" if alone else "distributed=ddp"


def _without_offload(facts: Facts) -> str:
    return f"{_plain(facts)} offload=none" if offloads(facts) else _plain(facts)


def _compiles_adam(facts: Facts) -> bool:
    return is_zero(facts) and offloads(facts) and facts.config.optimizer.option == "adamw"


RULES = (
    Rule(
        id="zero_needs_elementwise_optimizer",
        verdict=Verdict.impossible,
        path="optimizer",
        when=lambda f: is_zero(f) and f.config.optimizer.option not in ELEMENTWISE,
        value=lambda f: f.config.optimizer.option,
        why=lambda f: (
            f"under distributed={f.config.distributed.option}: "
            + WHY_NOT.get(f.config.optimizer.option, "has not been compared with itself there")
        ),
        fix=lambda f: "optimizer=adamw",
        source="arXiv:1910.02054, section 5; docs/design/deepspeed.md",
        versions=VERSION,
    ),
    Rule(
        id="zero_needs_float32_weights",
        verdict=Verdict.impossible,
        path="precision.weights",
        when=lambda f: is_zero(f) and f.config.precision.weights is not Weights.float32,
        value=lambda f: f.config.precision.weights.value,
        why=lambda f: (
            f"distributed={f.config.distributed.option} keeps float32 pieces of the weights to "
            "step on, and has not been compared with itself on narrower ones"
        ),
        fix=lambda f: "precision=bf16",
        source="docs/design/deepspeed.md",
        versions=VERSION,
    ),
    Rule(
        id="zero_without_float8",
        verdict=Verdict.impossible,
        path="precision.float8",
        when=lambda f: is_zero(f) and f.config.precision.float8 is not Float8.off,
        value=lambda f: f.config.precision.float8.value,
        why=lambda f: (
            f"distributed={f.config.distributed.option} has not been compared with itself on "
            "float8 layers"
        ),
        fix=lambda f: "precision=bf16",
        source="docs/design/deepspeed.md",
        versions=VERSION,
    ),
    Rule(
        id="zero_evaluates_as_it_trains",
        verdict=Verdict.impossible,
        path="precision.evaluation",
        when=lambda f: is_zero(f) and f.config.precision.evaluation is not Evaluation.same,
        value=lambda f: f.config.precision.evaluation.value,
        why=lambda f: "the number format is set inside DeepSpeed's engine, once for both",
        fix=lambda f: "precision.evaluation=same",
        source="deepspeed.runtime.engine, autocast_if_enabled; docs/design/deepspeed.md",
        versions=VERSION,
    ),
    Rule(
        id="zero_shares_out_all_weights",
        verdict=Verdict.impossible,
        path="peft",
        when=lambda f: is_zero(f) and f.config.peft.option != "none",
        value=lambda f: f.config.peft.option,
        why=lambda f: (
            f"under distributed={f.config.distributed.option} frozen weights have no part in "
            "checkpoints, and recomputed ones fail (transformers#47254); adapters leave little to "
            "share out"
        ),
        fix=_without_offload,
        source="https://github.com/huggingface/transformers/issues/47254",
        versions=VERSION,
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
