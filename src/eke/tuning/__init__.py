"""Recipes, memory advice, and the search for the fastest configuration that fits.

Input: a plan and its device. Output: overrides with reasons. Begin with `recipes`,
`memory_advice` and `search`.
"""
