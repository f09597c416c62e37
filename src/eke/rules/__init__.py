"""Rules that find invalid or ineffective configurations before anything is loaded; no torch."""

import dataclasses

from eke.common.errors import Problem
from eke.config.mixing import in_source, source_configs
from eke.rules.attention import RULES as ATTENTION_RULES
from eke.rules.compile import AUTO_RULES, KERNELS_RULES
from eke.rules.compile import RULES as COMPILE_RULES
from eke.rules.data import RULES as DATA_RULES
from eke.rules.deepspeed import NVME_RULES, OFFLOAD_RULES
from eke.rules.deepspeed import RULES as DEEPSPEED_RULES
from eke.rules.device import PACKAGE_RULES
from eke.rules.device import RULES as DEVICE_RULES
from eke.rules.distributed import RULES as DISTRIBUTED_RULES
from eke.rules.engine import RULES as ENGINE_RULES
from eke.rules.engine import find_argument_problems
from eke.rules.memory import RULES as MEMORY_RULES
from eke.rules.model import RULES as MODEL_RULES
from eke.rules.model import SHAPE_RULES
from eke.rules.optimizer import PEFT_RULES
from eke.rules.optimizer import RULES as OPTIMIZER_RULES
from eke.rules.precision import FLOAT8_RULES
from eke.rules.precision import RULES as PRECISION_RULES
from eke.rules.rule import Facts, Rule, Severity, find_limit_problems, with_defaults_for
from eke.rules.tracker import RULES as TRACKER_RULES
from eke.rules.training import RULES as WORK_RULES

RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    *WORK_RULES,
    *AUTO_RULES,
    *DATA_RULES,
    *PRECISION_RULES,
    *FLOAT8_RULES,
    *SHAPE_RULES,
    *OPTIMIZER_RULES,
    *MEMORY_RULES,
    *ATTENTION_RULES,
    *COMPILE_RULES,
    *KERNELS_RULES,
    *DISTRIBUTED_RULES,
    *DEEPSPEED_RULES,
    *OFFLOAD_RULES,
    *NVME_RULES,
    *PEFT_RULES,
    *ENGINE_RULES,
    *DEVICE_RULES,
    *TRACKER_RULES,
    *PACKAGE_RULES,
)

BY_SIZE = ("states_do_not_fit", "batch_does_not_fit")
"""Rules about a lower bound of the memory that a forecast predicts in full."""

NOT_BY_SIZE = tuple(rule for rule in RULES if rule.id not in BY_SIZE)
"""For searches that use the forecast to check memory."""

WITHOUT_EFFECT = frozenset(rule.id for rule in RULES if rule.verdict is Severity.no_effect)
"""Rules that warn of a setting without effect."""

NO_BENEFIT = frozenset(rule.id for rule in RULES if rule.verdict is Severity.no_benefit)
"""Rules that warn of a setting that saves nothing. For a chosen technique only those about its own
section count: a vocabulary that is no multiple of 8 is no reason against bfloat16."""


def check(facts: Facts, rules: tuple[Rule, ...] = RULES) -> tuple[list[Problem], list[Problem]]:
    """All findings at once.

    Args:
        facts: the configuration and the device it is meant for.
        rules: all by default; tests omit one to see the failure it prevents.

    Returns:
        Errors, which make the run impossible, and warnings.
    """
    limits = find_limit_problems(facts.config)
    facts = dataclasses.replace(facts, config=with_defaults_for(facts.config, limits))
    plain = [rule for rule in rules if not rule.sized]
    found = [(rule, rule.problem(facts)) for rule in plain if rule.when(facts)]
    refused = limits + find_argument_problems(facts.config)
    refused += [p for rule, p in found if rule.verdict is Severity.impossible]
    warned = [problem for rule, problem in found if rule.verdict is not Severity.impossible]
    about = tuple(rule for rule in plain if rule.key.partition(".")[0] in ("data", "task"))
    for number, source in enumerate(source_configs(facts.config)):
        own = check(dataclasses.replace(facts, config=source), about)
        errors, warnings = ([in_source(problem, number) for problem in each] for each in own)
        known = {(problem.id, problem.key) for problem in refused}
        refused += [problem for problem in errors if (problem.id, problem.key) not in known]
        # A shared key may have its effect on another source.
        warned += [problem for problem in warnings if problem.key.startswith("data.sources")]
    if not refused:
        sized = [rule for rule in rules if rule.sized and rule.when(facts)]
        refused = [rule.problem(facts) for rule in sized if rule.verdict is Severity.impossible]
        warned += [rule.problem(facts) for rule in sized if rule.verdict is not Severity.impossible]
    return refused, warned
