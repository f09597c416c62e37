"""Adaptive recipes: choose techniques for a device, a model and the overrides; no torch."""

from eke.tuning.chooser import Situation
from eke.tuning.recipes.recipes import FASTEST, LARGE_MODEL, LOW_MEMORY
from eke.tuning.recipes.resolver import RecipeResolver

RECIPES = {each.name: each for each in (FASTEST, LOW_MEMORY, LARGE_MODEL)}
"""Option of `recipe=` -> what it wants; the other recipes are fixed selections."""
