"""The rule about packages that an option needs and this environment lacks."""

from importlib.util import find_spec

from eke.check.rule import Facts, Rule, Verdict

NEEDS: dict[tuple[str, str], tuple[str, str]] = {
    ("tracker", "wandb"): ("wandb", "pip install wandb"),
}
"""Group and option -> the package it imports, and the line that installs it (for an extra,
`pip install "eke[NAME]"`)."""

_INSTEAD = {"tracker": "none"}
"""Group -> an option that needs no package."""


def _missing(facts: Facts) -> tuple[str, str] | None:
    """The first option whose package is not there."""
    for (group, option), (package, _) in NEEDS.items():
        if getattr(facts.config, group).option == option and find_spec(package) is None:
            return group, option
    return None


def _found(facts: Facts) -> tuple[str, str]:
    found = _missing(facts)
    assert found is not None, "asked for a problem that is not there"
    return found


def _fix(facts: Facts) -> str:
    group, option = _found(facts)
    return f"{group}={_INSTEAD[group]}   (or: {NEEDS[group, option][1]})"


RULES = (
    Rule(
        id="package_missing",
        verdict=Verdict.impossible,
        path="tracker",
        when=lambda f: not f.planning and _missing(f) is not None,
        value=lambda f: _found(f)[1],
        why=lambda f: f"needs the package {NEEDS[_found(f)][0]}, which is not installed",
        fix=_fix,
        source="pyproject.toml",
    ),
)
