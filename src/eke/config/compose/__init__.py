"""From the command line to a typed configuration, with every mistake explained at once."""

from eke.config.compose.arguments import Arguments, split_arguments
from eke.config.compose.composer import Composed, compose
from eke.config.compose.formatting import multirun
from eke.config.compose.help import help_text
from eke.config.compose.hydra_queries import check_question, is_completion, run_hydra_flags
from eke.config.compose.hydra_sweeps import is_for_hydra, launcher_of, sweep_by_hydra
from eke.config.compose.shell_completion import answer_shell
from eke.config.compose.user_overrides import claims, compose_with, is_set

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
