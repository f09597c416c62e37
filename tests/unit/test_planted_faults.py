"""Faults of tests/mutants.py: each can still be planted, and the tests that see it are there."""

import ast

import mutants
import pytest
from mutants import FAULTS, REPO, plant, table, undo
from support import REPO as ROOT

PACKAGES = {path.parent.name for path in (REPO / "src" / "eke").glob("*/__init__.py")}
IDS = [each.id for each in FAULTS]


def test_there_are_forty_and_every_package_has_one() -> None:
    assert len(set(IDS)) == len(IDS) >= 40
    assert {each.path.parts[2] for each in FAULTS} == PACKAGES
    assert ROOT == REPO


@pytest.mark.parametrize("each", FAULTS, ids=IDS)
def test_a_fault_is_planted_and_undone(each, tmp_path) -> None:
    for path in {other.path for other in FAULTS}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text((REPO / path).read_text())
    plant(each, tmp_path)
    ast.parse((tmp_path / each.path).read_text())
    assert undo(tmp_path) == [each.id]
    assert (tmp_path / each.path).read_text() == (REPO / each.path).read_text()


@pytest.mark.parametrize("each", FAULTS, ids=IDS)
def test_the_tests_that_see_it_are_there(each) -> None:
    assert each.tests
    for test in each.tests:
        file, _, name = test.partition("::")
        tree = ast.parse((REPO / "tests" / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_table_is_up_to_date() -> None:
    assert mutants.TABLE.read_text() == table(), "run python tests/mutants.py write"
