"""Rules that find invalid or ineffective configurations without importing torch.

Input: a `Config` and its device. Output: problems and warnings with their fixes. Begin with `check`
and `rule.Rule`. Each other module is one topic.
"""

import dataclasses

from eke.common.errors import Problem
from eke.config.mixing import source_configs, to_source_problem
from eke.config.schema.fields import find_limit_problems
from eke.rules import (
    attention,
    compile,
    data,
    deepspeed,
    distributed,
    engine,
    memory,
    model,
    optimizer,
    own_code,
    peft,
    precision,
    requirements,
    tracker,
    training,
)
from eke.rules.rule import Rule, RuleInputs, Severity, with_defaults_for

_TOPICS = (
    model, training, data, precision, optimizer, memory, attention, compile, distributed, deepspeed,
    peft, engine, own_code, requirements, tracker,
)  # fmt: skip
RULES: tuple[Rule, ...] = (
    *(dataclasses.replace(rule, id=id) for topic in _TOPICS for id, rule in topic.RULES.items()),
    *requirements.PACKAGE_RULES,
)

BY_SIZE = ("states_do_not_fit", "batch_does_not_fit")
"""Rules about a lower bound of memory. A forecast predicts all memory."""

NOT_BY_SIZE = tuple(rule for rule in RULES if rule.id not in BY_SIZE)
"""Rules for searches, which check memory with the forecast."""

WITHOUT_EFFECT = frozenset(rule.id for rule in RULES if rule.verdict is Severity.no_effect)

NO_BENEFIT = frozenset(rule.id for rule in RULES if rule.verdict is Severity.no_benefit)
"""Rules about settings without benefit. A search rejects a technique only for the rules about its
own section: a misaligned vocabulary is no reason against bfloat16."""


def check(
    facts: RuleInputs, rules: tuple[Rule, ...] = RULES
) -> tuple[list[Problem], list[Problem]]:
    """Return all errors and all warnings. Tests omit a rule to show the failure it prevents."""
    limits = list(find_limit_problems(facts.config))
    facts = dataclasses.replace(facts, config=with_defaults_for(facts.config, limits))
    plain = [rule for rule in rules if not rule.sized]
    found = [(rule, rule.problem(facts)) for rule in plain if rule.when(facts)]
    refused = limits + engine.find_argument_problems(facts.config)
    refused += [p for rule, p in found if rule.verdict is Severity.impossible]
    warned = [problem for rule, problem in found if rule.verdict is not Severity.impossible]
    about = tuple(rule for rule in plain if rule.key.partition(".")[0] in ("data", "task"))
    for number, source in enumerate(source_configs(facts.config)):
        own = check(dataclasses.replace(facts, config=source), about)
        errors, warnings = (
            [to_source_problem(problem, number) for problem in each] for each in own
        )
        known = {(problem.id, problem.key) for problem in refused}
        refused += [problem for problem in errors if (problem.id, problem.key) not in known]
        # A shared key may have an effect on another source.
        warned += [problem for problem in warnings if problem.key.startswith("data.sources")]
    if not refused:
        sized = [rule for rule in rules if rule.sized and rule.when(facts)]
        refused = [rule.problem(facts) for rule in sized if rule.verdict is Severity.impossible]
        warned += [rule.problem(facts) for rule in sized if rule.verdict is not Severity.impossible]
    return refused, warned
