"""Configuration: schema, composition by Hydra, sweeps, names of other tools, editor support."""
