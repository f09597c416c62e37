"""Recipes, and the search for the fastest configuration that fits."""
