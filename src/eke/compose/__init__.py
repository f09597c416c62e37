"""From the command line to a typed configuration, with every mistake explained at once."""

from eke.compose.arguments import Arguments, split_arguments
from eke.compose.ask import check_question, is_completion, run_hydra_flags
from eke.compose.by_hydra import is_for_hydra, launcher_of, sweep_by_hydra
from eke.compose.claims import claims, compose_with, is_set
from eke.compose.composer import Composed, compose
from eke.compose.help import help_text
from eke.compose.shells import answer_shell
from eke.compose.wording import multirun

__all__ = [
    "Arguments",
    "Composed",
    "answer_shell",
    "check_question",
    "claims",
    "compose",
    "compose_with",
    "help_text",
    "is_completion",
    "is_for_hydra",
    "is_set",
    "launcher_of",
    "multirun",
    "run_hydra_flags",
    "split_arguments",
    "sweep_by_hydra",
]
