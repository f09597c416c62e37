"""Everything that can be known to be wrong before anything is loaded; milliseconds, no torch."""

import dataclasses

from eke.check.limits import find_limit_problems, with_defaults_for
from eke.check.rule import Facts, Rule, Verdict
from eke.check.rules_device import RULES as DEVICE_RULES
from eke.check.rules_model import RULES as MODEL_RULES
from eke.check.rules_packages import RULES as PACKAGE_RULES
from eke.check.rules_work import RULES as WORK_RULES
from eke.errors import Problem

RULES: tuple[Rule, ...] = (*MODEL_RULES, *WORK_RULES, *DEVICE_RULES, *PACKAGE_RULES)

__all__ = [
    "RULES",
    "Facts",
    "Rule",
    "Verdict",
    "check",
]


def check(facts: Facts, rules: tuple[Rule, ...] = RULES) -> tuple[list[Problem], list[Problem]]:
    """All findings at once.

    Args:
        facts: the configuration and the device it is meant for.
        rules: all of them; tests leave one out to see the failure it prevents.

    Returns:
        What makes the run impossible, and what it should be warned about.
    """
    limits = find_limit_problems(facts.config)
    facts = dataclasses.replace(facts, config=with_defaults_for(facts.config, limits))
    plain = [rule for rule in rules if not rule.sized]
    found = [(rule, rule.problem(facts)) for rule in plain if rule.when(facts)]
    refused = limits + [p for rule, p in found if rule.verdict is Verdict.impossible]
    warned = [problem for rule, problem in found if rule.verdict is not Verdict.impossible]
    if not refused:
        sized = [rule for rule in rules if rule.sized and rule.when(facts)]
        refused = [rule.problem(facts) for rule in sized if rule.verdict is Verdict.impossible]
    return refused, warned
