"""Compose a configuration from the command line, reporting all errors at once."""

from eke.config.compose.command_line import Arguments, split_arguments
from eke.config.compose.completion import COMPLETION_FLAGS, answer_shell
from eke.config.compose.composer import Composed, compose, compose_with, is_set, user_set_keys
from eke.config.compose.help import help_text
from eke.config.compose.hydra import (
    check_info_flag,
    is_for_hydra,
    launcher_of,
    needs_sweep,
    run_hydra_flags,
    sweep_by_hydra,
)
