"""How long samples are, as far as the configuration says it."""

from eke.config.schema import Config, Lengths, Rows, Synthetic


def is_ragged(config: Config) -> bool:
    """Samples may have different lengths."""
    if isinstance(config.data, Synthetic):
        return config.data.lengths is not Lengths.fixed
    return isinstance(config.data, Rows)
