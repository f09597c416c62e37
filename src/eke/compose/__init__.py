"""From the command line to a typed configuration, with every mistake explained at once."""

from eke.compose.arguments import Arguments, split_arguments
from eke.compose.ask import check_question, is_completion, run_hydra_flags
from eke.compose.composer import Composed, compose
from eke.compose.expand import Cell, expand
from eke.compose.help import help_text
from eke.compose.shells import answer_shell

__all__ = [
    "Arguments",
    "Cell",
    "Composed",
    "answer_shell",
    "check_question",
    "compose",
    "expand",
    "help_text",
    "is_completion",
    "run_hydra_flags",
    "split_arguments",
]
