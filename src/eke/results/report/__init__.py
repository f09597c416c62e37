"""Reports of records; imports neither torch nor Hydra."""
