"""Fixtures of the tests of recipes."""

from recipe_plans import packages, units

__all__ = ["packages", "units"]
