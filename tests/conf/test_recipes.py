"""Whatever model, task and device: a recipe is planned wherever its command without it is."""

import os
from itertools import product

import pytest

from eke.common.errors import ConfigError
from eke.config.compose import compose
from eke.config.compose.catalogue import headline, make_catalogue
from eke.models.families import FAMILIES
from eke.tuning.recipes import RECIPES
from eke.workflows.planning import plan_for

CATALOGUE = make_catalogue()
MODELS = [name for name in CATALOGUE.options["model"] if name != "pretrained"]
DEVICES = [name for name in CATALOGUE.options["hardware"] if name != "auto"]
TASKS = sorted({task for each in FAMILIES.values() for task in each.tasks})

EVERY = "EKE_EVERY_RECIPE" in os.environ
"""Each of these with each recipe: minutes."""

ALL = list(product(MODELS, TASKS))
CASES = [(m, t, r, DEVICES[(7 * n + k) % len(DEVICES)])
         for n, (m, t) in enumerate(ALL) for k, r in enumerate(RECIPES)
         if EVERY or (n + k) % len(RECIPES) == 0]  # fmt: skip
"""Each model with each task, one recipe after the other, on one device after the other."""

QUICK = CASES[:: len(CASES) // 14]


def refused(*overrides: str) -> set[str]:
    """The rules that refuse a command; nothing where it is planned."""
    try:
        plan_for(compose([*overrides, "data=synthetic", "tracker=none"]), planning=True)
    except ConfigError as error:
        return {problem.id for problem in error.problems}
    return set()


@pytest.mark.parametrize(
    ("model", "task", "recipe", "hardware"),
    [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in CASES],
)
def test_recipe_does_not_cause_a_rejection(model, task, recipe, hardware) -> None:
    asked = (f"model={model}", f"task={task}", f"hardware={hardware}")
    found = refused(*asked, f"recipe={recipe}")
    assert not found or found <= refused(*asked)


def test_adaptive_recipes_have_files_and_name_their_numerics() -> None:
    assert set(RECIPES) <= set(CATALOGUE.options["recipe"])
    for name in RECIPES:
        assert "16-bit products" in headline(CATALOGUE.options["recipe"][name])
