"""What a recipe that adapts makes of a configuration: sections chosen, and a decision for each."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from eke.config.compose import Composed, claims, compose_with
from eke.config.compose.catalogue import make_catalogue
from eke.config.schema import Config
from eke.hardware import Device, bfloat16_units, usable_cores
from eke.plan.planner import Decision, Plan, make_plan
from eke.tuning.recipes import RECIPES, Kitchen, Situation, decided_by


def chosen_overrides(plan: Plan, own: Path | None = None) -> list[str]:
    """What its recipe came to, as somebody would type it in the recipe's place.

    Args:
        plan: with its decisions; none of them is a recipe's where it does not adapt.
        own: the user's folder of options.
    """
    catalogue = make_catalogue(own)
    typed = {*catalogue.options, *catalogue.keys}  # other decisions tell what follows from these
    mine = decided_by(plan.choices.get("recipe", "none"))
    return [
        f"{decision.key}={decision.value}"
        for decision in plan.decisions
        if decision.reason.startswith(mine) and decision.key in typed
    ]


@dataclass(frozen=True)
class Adapted:
    """A configuration with what its recipe has chosen."""

    config: Config
    choices: Mapping[str, str]
    """Option of each group."""
    decisions: tuple[Decision, ...] = ()
    """One for each choice, with its reason."""

    def shown_in(self, plan: Plan) -> Plan:
        """The plan with these decisions behind the one about its device."""
        first, *others = plan.decisions
        return replace(plan, decisions=(first, *self.decisions, *others))


def adapted(composed: Composed, config: Config, device: Device, num_nodes: int) -> Adapted:
    """The configuration as its recipe wants it on a device.

    Nothing is changed that was typed, that a row of a sweep or the experiment sets, or that a rule
    refuses; without a recipe that adapts, nothing at all.

    Args:
        composed: what is wanted.
        config: the same, its checkpoint and tokenizer looked up.
        device: what it will run on.
        num_nodes: machines that it can use.

    Raises:
        ConfigError: it cannot be planned, with or without the recipe.
    """
    recipe = RECIPES.get(composed.choices.get("recipe", "none"))
    if recipe is None:
        return Adapted(config, composed.choices)
    kitchen = Kitchen(recipe, claims(composed), lambda more: compose_with(composed, more).config)
    start = Situation(
        config=config,
        device=device,
        num_nodes=num_nodes,
        cores=usable_cores() // max(1, config.distributed.num_processes),
        bfloat16_units=bfloat16_units() if device.kind == "cpu" else (),
    )

    def base(config: Config) -> Plan:
        return make_plan(config, composed.choices, composed.overrides, device, "")

    chosen = kitchen.settle(start, base).config
    typed = [choice.override.partition("=")[::2] for choice in kitchen.choices]
    options = {group: option for group, option in typed if group in composed.choices}
    decisions = tuple(choice.decision for choice in kitchen.choices)
    return Adapted(chosen, {**composed.choices, **options}, decisions)
