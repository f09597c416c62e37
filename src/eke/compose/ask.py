"""Hydra's own questions, answered by Hydra: `--cfg job`, `--info`, `--hydra-help` and the like."""

import sys

import hydra

from eke.compose.arguments import Arguments
from eke.errors import ConfigError, Problem
from eke.paths import conf_folder
from eke.schema import register

QUESTIONS = ("--cfg", "-c", "--info", "-i", "--hydra-help", "--shell-completion", "-sc")
"""Flags that ask for something to be printed."""

COMPANIONS = ("--resolve", "--package", "-p")
"""Flags that say more about a question."""


def is_completion(arguments: Arguments) -> bool:
    """Whether a shell asks: what it hands over is no configuration."""
    return any(flag in arguments.hydra_flags for flag in ("--shell-completion", "-sc"))


def run_hydra_flags(arguments: Arguments) -> int:
    """Let Hydra print its answer.

    Raises:
        ConfigError: a flag that would change what is run behind eke's back, or that asks nothing.
    """
    flags = [flag for flag in arguments.hydra_flags if flag.startswith("-")]
    for flag in flags:
        if flag not in QUESTIONS + COMPANIONS:
            why = "would run something else than eke checks; your own options go into a folder"
            raise ConfigError(Problem(flag, "", why, "--config-dir FOLDER"))
    if not any(flag in QUESTIONS for flag in flags):
        raise ConfigError(Problem(flags[0], "", "goes with --cfg job", f"--cfg job {flags[0]}"))
    register()
    folder = ["--config-dir", str(arguments.config_dir)] if arguments.config_dir else []
    multirun = ["--multirun"] if arguments.multirun else []
    before = sys.argv
    sys.argv = [before[0], *arguments.hydra_flags, *folder, *multirun, *arguments.overrides]
    try:
        hydra.main(config_path=str(conf_folder()), config_name="config", version_base="1.3")(
            lambda config: None
        )()
    finally:
        sys.argv = before
    return 0
