"""Rules about the training loop."""

from eke.rules.rule import Facts, Rule, Verdict

STRATEGIES = ("none", "ddp")
"""Options of `distributed` whose ranks have the whole training state, as Trainer expects here."""


def _takes_no_steps(facts: Facts) -> str:
    """The override that brings an optimizer step of its own; empty where there is none."""
    config = facts.config
    if config.distributed.option not in STRATEGIES:
        return f"distributed={config.distributed.option}"
    return "memory.optimizer_in_backward=true" if config.memory.optimizer_in_backward else ""


RULES: tuple[Rule, ...] = (
    Rule(
        id="trainer_takes_plain_steps",
        verdict=Verdict.impossible,
        path="engine",
        when=lambda f: f.config.engine.option == "trainer" and bool(_takes_no_steps(f)),
        value=lambda f: f.config.engine.option,
        why=lambda f: f"Trainer takes the optimizer's steps, and {_takes_no_steps(f)} its own",
        fix=lambda f: "engine=loop",
        source="src/eke/training/loop/trainer_engine",
    ),
    Rule(
        id="extra_needs_trainer",
        verdict=Verdict.no_effect,
        path="trainer.extra",
        when=lambda f: bool(f.config.trainer.extra) and f.config.engine.option != "trainer",
        value=lambda f: ", ".join(f.config.trainer.extra),
        why=lambda f: (
            f"arguments of Hugging Face Trainer, which engine={f.config.engine.option} does not "
            "read"
        ),
        fix=lambda f: "engine=trainer",
        source="src/eke/training/loop/trainer_engine",
    ),
)
