"""Rules about offloading."""

from eke.config.schema import NvmeOffload
from eke.models.sizes import STAGE
from eke.rules.deepspeed import VERSION, is_zero, offloads
from eke.rules.rule import Facts, Rule, Verdict

OFFLOAD_DOCS = "https://www.deepspeed.ai/docs/config-json/#parameter-offloading"


def _stage(facts: Facts) -> str:
    """The mildest stage that can offload what was asked for, in as many processes as now."""
    zero = "zero2" if facts.config.offload.option == "optimizer_cpu" else "zero3"
    processes = facts.config.distributed.num_processes
    return f"distributed={zero}" + (f" distributed.num_processes={processes}")


def _is_nvme(facts: Facts) -> bool:
    return isinstance(facts.config.offload, NvmeOffload)


RULES = (
    Rule(
        id="offload_needs_zero",
        verdict=Verdict.impossible,
        path="offload",
        when=lambda f: offloads(f) and not is_zero(f),
        value=lambda f: f.config.offload.option,
        why=lambda f: (
            f"it is DeepSpeed's; distributed={f.config.distributed.option} trains without DeepSpeed"
        ),
        fix=_stage,
        source=OFFLOAD_DOCS,
    ),
    Rule(
        id="offload_needs_zero3",
        verdict=Verdict.impossible,
        path="offload",
        when=lambda f: (
            f.config.distributed.option in ("zero1", "zero2")
            and f.config.offload.option in ("params_cpu", "nvme")
        ),
        value=lambda f: f.config.offload.option,
        why=lambda f: (
            f"needs state that is cut by weight, as stage 3 has it; "
            f"{f.config.distributed.option} is stage {STAGE[f.config.distributed.option]}"
            + (", and would silently keep it in host memory" if _is_nvme(f) else "")
        ),
        fix=lambda f: "distributed=zero3",
        source=OFFLOAD_DOCS,
        versions=VERSION,
    ),
    Rule(
        id="offload_on_cpu",
        verdict=Verdict.no_effect,
        path="offload",
        when=lambda f: is_zero(f) and offloads(f) and f.device.kind == "cpu" and not _is_nvme(f),
        value=lambda f: f.config.offload.option,
        why=lambda f: "the device is the host: what would leave the device's memory stays in it",
        fix=lambda f: "offload=none",
        source="arXiv:2101.06840",
    ),
)
