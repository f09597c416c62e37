"""What the others are compared with: said by the user, or the first that ended well."""

import shlex
from collections.abc import Sequence

from eke.common.errors import ConfigError, Problem
from eke.results.report.compare.variants import Machine, Variant

ROW = "baseline"
"""A row of this name is the baseline unless another is asked for."""


def choose(
    variants: Sequence[Variant], machines: Sequence[Machine], asked: str, keys: Sequence[str]
) -> tuple[dict[str, Variant], list[str]]:
    """The baseline of each machine, and what has to be said about the choice.

    Args:
        variants: all of them.
        machines: kinds of machines.
        asked: `key=value,...`, or the name of a row; empty for the default.
        keys: factors that differ.

    Raises:
        ConfigError: no configuration is meant by `asked`, or several on one machine.
    """
    meant = [v for v in variants if _is_meant(v, asked or ROW)]
    if asked and not meant:
        example = _example(variants)
        why = f"no run has it; what differs is {', '.join(keys) or 'nothing'}"
        raise ConfigError(Problem("--baseline", asked, why, f"--baseline {example}"))
    chosen: dict[str, Variant] = {}
    notes: list[str] = []
    for machine in machines:
        here = [v for v in meant if v.machine == machine.letter]
        good = [v for v in here if v.records]
        if asked and len(here) > 1:
            why = f"{len(here)} configurations have it: {'; '.join(v.label for v in here[:4])}"
            fix = f"--baseline {_spelled(here[0], keys, variants)}"
            raise ConfigError(Problem("--baseline", asked, why, fix))
        if good:
            chosen[machine.letter] = good[0]
            continue
        where = f" on machine {machine.letter}" if len(machines) > 1 else ""
        if here or asked:
            notes.append(
                f"the baseline did not end well{where}: nothing is compared with it"
                if here
                else f"the baseline did not run{where}: nothing is compared there"
            )
            if asked:
                continue
        first = next((v for v in variants if v.machine == machine.letter and v.records), None)
        if first is not None:
            chosen[machine.letter] = first
    return chosen, notes


def _is_meant(variant: Variant, asked: str) -> bool:
    # `eke fit` names its rows by what was changed, so a row's name may have a `=`, too.
    if "=" not in asked or asked in (*variant.rows, variant.label):
        return asked in (*variant.rows, variant.label)
    pairs = [part.partition("=")[::2] for part in asked.split(",")]
    return all(variant.settings.get(key.strip()) == value.strip() for key, value in pairs)


def _spelled(variant: Variant, keys: Sequence[str], variants: Sequence[Variant]) -> str:
    """What means this one alone, as a shell takes it."""
    if variant.row and sum(variant.row in each.rows for each in variants) == 1:
        return shlex.quote(variant.row)
    told: list[str] = []
    left = list(variants)
    for key in keys:
        value = variant.factors.get(key)
        narrower = [each for each in left if each.settings.get(key) == value]
        if value and len(narrower) < len(left):
            told, left = [*told, f"{key}={value}"], narrower
    return shlex.quote(",".join(told))


def _example(variants: Sequence[Variant]) -> str:
    first = next((v for v in variants if v.records), variants[0])
    spelled = _spelled(first, list(first.factors), variants)
    return spelled if spelled != shlex.quote("") else "KEY=VALUE"
