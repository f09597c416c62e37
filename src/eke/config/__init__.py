"""Configuration: schema, composition by Hydra, sweeps, names of other tools, editor support.

Input: overrides of a command line. Output: a `Config`, or a ConfigError with all problems.
Begin with `schema` (all keys), `compose.compose` (one run) and `sweep.expand` (a sweep).
"""
