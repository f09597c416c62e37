"""What the user has decided, so that a recipe's choices leave it alone; and composing once more."""

from collections.abc import Sequence

from eke.common.paths import conf_folder
from eke.config.compose.catalogue import make_catalogue
from eke.config.compose.composer import Composed, compose
from eke.config.compose.independent_options import set_by_preset


def claims(composed: Composed) -> frozenset[str]:
    """Groups and key paths that were typed, or that the experiment sets: `precision`, `seed`.

    A named sweep stands before the recipe (docs/design/composing.md): its fixed settings are no
    claims, its rows are, since each cell has them as if they were typed.
    """
    typed = {text.lstrip("+~").partition("=")[0] for text in composed.overrides}
    catalogue = make_catalogue(composed.config_dir)
    experiment = composed.choices.get("experiment", "none")
    return frozenset(typed | set(set_by_preset("experiment", experiment, catalogue)))


def is_set(composed: Composed, key: str) -> bool:
    """Whether a key has a value of the user's: typed, of an experiment, a sweep or an own option.

    Args:
        composed: what was asked for.
        key: `group.key`.
    """
    catalogue = make_catalogue(composed.config_dir)
    group, option = key.partition(".")[0], composed.choices.get(key.partition(".")[0], "")
    presets = {
        path
        for preset in ("sweep", "recipe")
        for path in set_by_preset(preset, composed.choices.get(preset, "none"), catalogue)
    }
    file = catalogue.options.get(group, {}).get(option)
    own = file is not None and not file.is_relative_to(conf_folder())
    return own or key in presets | claims(composed)


def compose_with(composed: Composed, choices: Sequence[str]) -> Composed:
    """The same command without its recipe's fixed part, and with what the recipe chose instead.

    Args:
        composed: what was asked for.
        choices: overrides for groups and keys that nobody claims.

    Raises:
        ConfigError: they cannot be composed together.
    """
    typed = [text for text in composed.overrides if not text.startswith("recipe=")]
    return compose([*typed, "recipe=none", *choices], composed.config_dir, in_sweep=True)
