"""Adaptive recipes: choose techniques by device, model and overrides, without torch."""

from eke.tuning.recipe_search import ChoiceContext
from eke.tuning.recipes.recipes import FASTEST, LARGE_MODEL, LOW_MEMORY
from eke.tuning.recipes.resolver import RecipeResolver

RECIPES = {each.name: each for each in (FASTEST, LOW_MEMORY, LARGE_MODEL)}
"""Adaptive recipes by option of `recipe`. The other recipes are fixed selections."""
