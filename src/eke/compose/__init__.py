"""From the command line to a typed configuration, with every mistake explained at once."""

from eke.compose.arguments import Arguments, split_arguments
from eke.compose.composer import Composed, compose
from eke.compose.help import help_text

__all__ = ["Arguments", "Composed", "compose", "help_text", "split_arguments"]
