"""Tests that are named elsewhere exist, and planted faults (tests/mutants.py) can be planted."""

import ast
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import mutants
import pytest
from mutants import FAULTS, REPO, plant, table, undo
from support import REPO as ROOT

PACKAGES = {path.parent.name for path in (REPO / "src" / "eke").glob("*/__init__.py")}
IDS = [each.id for each in FAULTS]


def test_forty_mutants_cover_every_package() -> None:
    assert len(set(IDS)) == len(IDS) >= 40
    assert {each.path.parts[2] for each in FAULTS} == PACKAGES
    assert ROOT == REPO


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that faults are planted in."""
    root = tmp_path_factory.mktemp("tree")
    for path in {each.path for each in FAULTS}:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text((REPO / path).read_text())
    return root


@pytest.mark.parametrize("each", FAULTS, ids=IDS)
def test_mutant_is_applied_and_reverted(each, tree) -> None:
    plant(each, tree)
    ast.parse((tree / each.path).read_text())
    assert undo(tree) == [each.id]
    assert (tree / each.path).read_text() == (REPO / each.path).read_text()


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((REPO / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def exists(test: str) -> bool:
    """Whether `FILE::FUNCTION[CASE]` names a function of a file below tests/."""
    file, _, name = test.partition("[")[0].partition("::")
    return name in functions_of(file)


@pytest.mark.parametrize("each", FAULTS, ids=IDS)
def test_tests_that_detect_a_mutant_exist(each) -> None:
    assert each.tests
    assert [test for test in each.tests if not exists(test)] == []


def test_mutant_table_is_up_to_date() -> None:
    assert mutants.TABLE.read_text() == table(), "run python tests/mutants.py write"


@pytest.mark.parametrize("script", sorted((REPO / "benchmarks").glob("*.py")), ids=lambda p: p.stem)
def test_names_that_a_benchmark_imports_exist(script) -> None:
    """Most are never run here, and a name that has moved would be noticed months later."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eke"):
            module = import_module(node.module)
            for name in (alias.name for alias in node.names):
                below = hasattr(module, "__path__") and find_spec(f"{node.module}.{name}")
                assert hasattr(module, name) or below, f"{node.module} has no {name}"
