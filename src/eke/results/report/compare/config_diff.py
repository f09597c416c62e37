"""What sets configurations apart: groups whose option differs, and keys that differ beyond them."""

from collections.abc import Mapping, Sequence
from typing import Any

from eke.common.units import format_value
from eke.plan.identity import PRESENTATION, meaningful
from eke.plan.record import Record

Factors = Mapping[str, str]
"""Key path or group -> value, as typed."""

REPEATED = ("seed", "repeat")
"""Keys of repeats: runs that differ in nothing else are one configuration."""

SUMMARIES = ("recipe", "experiment")
"""Groups that only choose options of others: what they chose tells more."""

ABSENT = ""
"""The value of a key that a configuration has not."""


def configuration(record: Record) -> dict[str, Any]:
    """What a record's run was asked for, without what only names or repeats it."""
    try:
        kept = meaningful(record.config)
    except (AttributeError, KeyError, TypeError):  # of another version of the schema
        kept = {key: value for key, value in record.config.items() if key not in PRESENTATION}
    return {key: value for key, value in kept.items() if key not in REPEATED}


def settings(record: Record) -> dict[str, str]:
    """Every group's option and every key of a record, as typed."""
    chosen = {
        group: str(option)
        for group, option in record.choices.items()
        if group not in PRESENTATION and group not in SUMMARIES
    }
    return {**chosen, **dict(_leaves(configuration(record)))}


def typed_settings(overrides: Sequence[str]) -> dict[str, str]:
    """What was typed for a cell that has no record."""
    pairs = (text.lstrip("+").partition("=")[::2] for text in overrides)
    return {
        key: value
        for key, value in pairs
        if key.split(".")[0] not in PRESENTATION and key not in (*REPEATED, *SUMMARIES)
    }


def differing(found: Sequence[Factors]) -> list[str]:
    """Keys that tell configurations apart, groups first.

    A key whose group's option says its value is left out: `optimizer=adafactor` is enough.

    Args:
        found: the settings of configurations that have a record.
    """
    values = _values(found)
    keys = [key for key, seen in values.items() if len(seen) > 1]
    groups = [key for key in keys if "." not in key]
    return groups + [
        key for key in keys if "." in key and not _follows(key, key.split(".")[0], found)
    ]


def implied(
    keys: Sequence[str], found: Sequence[Factors], typed: Sequence[tuple[str, ...]]
) -> list[frozenset[str]]:
    """Of each configuration, the keys whose value its option brings: they belong to the option.

    An option brings the one value that a key has in all configurations which did not type it.

    Args:
        keys: of `differing`.
        found: the settings of configurations that have a record.
        typed: what was typed for each of these.
    """
    below = [(key, key.split(".")[0]) for key in keys if "." in key]
    brought: dict[tuple[str, str], set[str]] = {}
    for each, mine in zip(found, map(typed_settings, typed), strict=True):
        for key, group in below:
            if key not in mine and group in each:
                brought.setdefault((key, each[group]), set()).add(each.get(key, ABSENT))
    return [
        frozenset(
            key for key, group in below
            if brought.get((key, each.get(group, ABSENT))) == {each.get(key, ABSENT)}
        )
        for each in found
    ]  # fmt: skip


def complete(
    keys: Sequence[str],
    found: Sequence[Factors],
    typed: Sequence[tuple[str, ...]],
    lone: Sequence[Factors],
) -> list[str]:
    """`keys`, and those by which cells without a record differ: for names, never for effects.

    Args:
        keys: of `differing`.
        found: settings of configurations with a record.
        typed: what was typed for each of these.
        lone: what was typed for the cells without a record.
    """
    more = dict.fromkeys(key for each in lone for key in each if key not in keys)
    return [
        *keys,
        *(
            key
            for key in more
            if len({each.get(key, usual(key, found, typed)) for each in (*lone, *found)}) > 1
        ),
    ]  # fmt: skip


def usual(key: str, found: Sequence[Factors], typed: Sequence[tuple[str, ...]]) -> str:
    """The value of a key where nobody typed it; unknown if it was typed everywhere."""
    values = {
        each.get(key, ABSENT)
        for each, overrides in zip(found, typed, strict=True)
        if key not in typed_settings(overrides)
    }
    return values.pop() if len(values) == 1 else ABSENT


def _values(found: Sequence[Factors]) -> dict[str, set[str]]:
    keys = dict.fromkeys(key for each in found for key in each)
    return {key: {each.get(key, ABSENT) for each in found} for key in keys}


def _follows(key: str, group: str, found: Sequence[Factors]) -> bool:
    """Whether the option of its group says what a key is."""
    by_option: dict[str, set[str]] = {}
    for each in found:
        if group in each:
            by_option.setdefault(each[group], set()).add(each.get(key, ABSENT))
    return len(by_option) > 1 and all(len(values) == 1 for values in by_option.values())


class Telling:
    """What tells each of many configurations from the others, without what that itself says.

    Of what was not typed for it, a key is left out where all configurations with the same option of
    its group agree on it, and one that nobody typed (a checkpoint's hash) where another key of its
    group determines it.

    Args:
        keys: of `differing`.
        found: the settings of all configurations.
        typed: what was typed for each of these.
    """

    def __init__(
        self, keys: Sequence[str], found: Sequence[Factors], typed: Sequence[tuple[str, ...]]
    ) -> None:
        self._keys, self._found = keys, found
        self._anybodys = {key for each in typed for key in typed_settings(each)}
        self._answers: dict[tuple[str, str], bool] = {}

    def of(self, one: Factors, overrides: Sequence[str]) -> Factors:
        """Of one configuration.

        Args:
            one: its settings.
            overrides: what was typed for it.
        """
        mine = typed_settings(overrides)
        told = (key for key in self._keys if key in one)
        return {key: one[key] for key in told if key in mine or self._is_told(key, one)}

    def _is_told(self, key: str, one: Factors) -> bool:
        group = key.split(".")[0]
        if "." not in key or group not in one:
            return True
        case = key, one[group]  # thousands of configurations have few options
        if case not in self._answers:
            self._answers[case] = self._is_news(key, group, one[group])
        return self._answers[case]

    def _is_news(self, key: str, group: str, option: str) -> bool:
        alike = [each for each in self._found if each.get(group) == option]
        if len(alike) < len(self._found) and len({each.get(key, ABSENT) for each in alike}) == 1:
            return False
        anybodys = self._anybodys
        others = [k for k in self._keys if k.startswith(f"{group}.") and k in anybodys]
        return key in anybodys or not any(_determines(k, key, alike) for k in others)


def _determines(one: str, other: str, found: Sequence[Factors]) -> bool:
    """Whether configurations that agree on one key agree on the other."""
    pairs = {(each.get(one, ABSENT), each.get(other, ABSENT)) for each in found}
    return len(pairs) == len({value for value, _ in pairs})


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    leaves: list[tuple[str, str]] = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            leaves += _leaves(value, f"{path}.")
        elif key != "option":
            leaves.append((path, format_value(value)))
    return leaves
