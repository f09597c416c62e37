"""Recipes that adapt: which techniques suit a device, a model and what was typed; no torch."""

from eke.recipes.fastest import FASTEST
from eke.recipes.large_model import LARGE_MODEL
from eke.recipes.low_memory import LOW_MEMORY
from eke.recipes.settle import Kitchen, decided_by
from eke.recipes.wish import Candidate, Choice, Recipe, Situation, Wish

RECIPES: dict[str, Recipe] = {each.name: each for each in (FASTEST, LOW_MEMORY, LARGE_MODEL)}
"""Option of `recipe=` -> what it wants; the other recipes are fixed selections."""

__all__ = [
    "RECIPES",
    "Candidate",
    "Choice",
    "Kitchen",
    "Recipe",
    "Situation",
    "Wish",
    "decided_by",
]
