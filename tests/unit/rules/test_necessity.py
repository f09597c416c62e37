"""Every rule has something that shows that it is needed; the table is unit/rules/necessity.py."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from support import REPO
from trained import train_job
from unit.rules.cases import CASES, prepare
from unit.rules.necessity import FAILS, ROWS, SHOWN, Kind
from unit.rules.test_without_effect import SAME
from unit.rules.without import plan_without

from eke.rules import RULES

UNSHOWN = {Kind.nowhere: 5}
"""Rules without a test of their own, of each kind: may become fewer."""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request) -> Path:
    """The surroundings some rules look at."""
    prepare(request.node.callspec.params["rule"], tmp_path, monkeypatch)
    return tmp_path


def test_necessity_table_lists_every_rule() -> None:
    assert set(SHOWN) == {rule.id for rule in RULES}
    assert len(ROWS) + len(SAME) == len(SHOWN), "none of them twice"


@cache
def functions(file: str) -> frozenset[str]:
    """Names of the functions of a file below `tests`."""
    tree = ast.parse((REPO / "tests" / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_tests_of_the_necessity_table_exist() -> None:
    for rule, shown in SHOWN.items():
        if not shown.test:
            assert shown.reason, f"{rule}: why there is none"
            continue
        file, _, name = shown.test.partition("::")
        assert name.startswith("test_"), rule
        assert name in functions(file), rule


def test_few_rules_have_no_test() -> None:
    missing = Counter(shown.kind for shown in SHOWN.values() if not shown.test)
    assert missing == UNSHOWN


@pytest.mark.parametrize("rule", FAILS)
def test_run_fails_if_the_rule_is_disabled(rule, world, monkeypatch) -> None:
    overrides = [o.format(tmp=world) for o in CASES[rule][0]]
    with pytest.raises(Exception, match=FAILS[rule]) as caught:  # whatever the libraries raise
        train_job(plan_without(rule, overrides, monkeypatch), world / "run")
    problems = getattr(caught.value, "problems", ())
    others = {each.id for each in RULES} - {rule}
    assert not others & {problem.id for problem in problems}, "another rule refused it"
