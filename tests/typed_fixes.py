"""What a user does with a refusal: types its fixes; and what may be wrong with a curve."""

import math
import shlex
from collections.abc import Callable
from typing import Any

from equivalence_compare import Curve
from random_configurations import CATALOGUE, has_key
from support import last_wins

from eke.common.errors import ConfigError, Fix, Problem

MAX_MENDINGS = 6
"""Rounds of typing all fixes; one mended value may break the next rule."""


def typed_fixes(command: tuple[str, ...], problems: list[Problem]) -> tuple[str, ...]:
    """The command with every fix typed in a shell over what it corrects, placeholders as they are.

    A fix that chooses another option takes the keys with it that only the old option had.
    """
    fixes = [word for p in problems for word in shlex.split(str(Fix(*p.fix.words)))]
    command = last_wins(*command, *fixes)
    groups = dict(o.split("=", 1) for o in command if o.split("=")[0] in CATALOGUE.options)
    return tuple(o for o in command if o in fixes or has_key(groups, o.split("=")[0]))


def mended(command: tuple[str, ...], plan: Callable[..., Any]) -> tuple[str, ...]:
    """The command that `plan` accepts once fixes are typed.

    Raises:
        AssertionError: where the fixes never mend it.
    """
    for _ in range(MAX_MENDINGS):
        try:
            plan(*command)
        except ConfigError as error:
            problems = error.problems
            missing = [p.render() for p in problems if not str(p.fix)]
            assert not missing, f"{command}: no fix for {missing}"
            command = typed_fixes(command, problems)
        else:
            return command
    raise AssertionError(f"fixes never mend {command}: {[p.render() for p in problems]}")


def complaint(command: tuple[str, ...], curve: Curve) -> str:
    """What is wrong with a curve; empty when nothing is."""
    # A loss scale that is still too high shows as an infinite norm, and its step is skipped.
    scaled = any(o in ("precision=fp16", "precision.compute=float16") for o in command)
    scaled = scaled or "recipe=guide_best" in command
    for loss, norm in curve:
        if not math.isfinite(loss) or not (scaled or math.isfinite(norm)):
            return f"loss {loss}, gradient norm {norm}"
    return ""
