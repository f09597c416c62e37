"""Rules about `batch=auto`, which are asked before a micro-batch is chosen."""

from eke.config.schema import DEFAULT_PER_DEVICE
from eke.rules.rule import Facts, Rule, Verdict

SOURCE = "docs/forecast.md, batch=auto: it chooses the micro-batch, the samples per step stay"


def _same_step(facts: Facts) -> str:
    """The samples per step that the accumulation would have made with the usual micro-batch."""
    config = facts.config
    times = DEFAULT_PER_DEVICE * (config.batch.accumulation or 1)
    target = config.batch.target or times * config.distributed.num_processes
    return f"batch.accumulation=null batch.target={target}"


RULES = (
    Rule(
        id="auto_chooses_micro_batch",
        verdict=Verdict.impossible,
        path="batch.per_device",
        when=lambda f: f.config.batch.option == "auto" and f.config.batch.per_device is not None,
        value=lambda f: f.config.batch.per_device,
        why=lambda f: "is what batch=auto would choose; only one of the two can hold",
        fix=lambda f: "batch=fixed   (or batch.per_device=null, and batch=auto chooses)",
        source=SOURCE,
    ),
    Rule(
        id="auto_derives_accumulation",
        verdict=Verdict.impossible,
        path="batch.accumulation",
        when=lambda f: (
            f.config.batch.per_device is None and f.config.batch.accumulation is not None
        ),
        value=lambda f: f.config.batch.accumulation,
        why=lambda f: (
            "depends on the micro-batch that batch=auto chooses; what it keeps is batch.target, "
            "the samples of an optimizer step"
        ),
        fix=_same_step,
        source=SOURCE,
    ),
)
