"""The one shape of what is wrong with a checkpoint."""

from eke.common.errors import ConfigError, Problem

KEY = "model.name_or_path"


def refuse(typed: str, why: str, fix: str = f"{KEY}=ANOTHER_FOLDER_OR_HUB_NAME") -> ConfigError:
    """The error to raise for a checkpoint that cannot be used.

    Args:
        typed: the folder or name, as the user typed it.
        why: a clause that follows it.
        fix: the override or the command that mends it.
    """
    return ConfigError(Problem(KEY, typed, why, fix, "pretrained"))
