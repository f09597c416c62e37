"""The table of names that exist only to be refused."""

import shlex

import pytest

from eke.compose import compose, split_arguments
from eke.compose.catalogue import make_catalogue
from eke.compose.overrides import find_problems
from eke.compose.retired import RETIRED, find_retired

CATALOGUE = make_catalogue()


def texts_of(name: str) -> list[str]:
    return [name] if "=" in name else [f"{name}={v}" for v in ("true", "false", "4", "adamw")]


def test_no_retired_name_is_a_real_one() -> None:
    for name in RETIRED:
        group, _, option = name.partition("=")
        alive = option in CATALOGUE.options[group] if option else name in CATALOGUE.keys
        assert not alive, f"{name} exists now: remove its row"
        assert option or name not in CATALOGUE.options


def test_every_row_has_one_problem_with_a_reason_and_the_fix_there_is() -> None:
    for name, row in RETIRED.items():
        for text in texts_of(name):
            (problem, *others) = find_problems(text, CATALOGUE)
            assert not others
            assert problem.why, text
            assert not problem.fix or row.overrides(text.partition("=")[2]), text


FIXES = sorted(
    {
        problem.fix
        for name in RETIRED
        for text in texts_of(name)
        for problem in find_problems(text, CATALOGUE)
        if problem.fix
    }
)


def test_every_fix_is_right_by_itself() -> None:
    for fix in FIXES:
        for override in shlex.split(fix):
            assert find_problems(override, CATALOGUE) == [], fix


@pytest.mark.slow
def test_every_fix_composes() -> None:
    for fix in FIXES:
        typed = list(split_arguments(shlex.split(fix)).overrides)
        pretrained = "model.name_or_path=" in fix and "model=pretrained" not in typed
        typed += ["model=pretrained"] if pretrained else []
        data = [word for word in typed if word.startswith("data=")]
        if any(word.startswith("data.") for word in typed) and not data:
            typed.append("data=jsonl")  # of files, which the user has chosen
        of_files = {"data=csv", "data=jsonl", "data=parquet", "data=text"} & {*typed}
        if of_files and "data.path=" not in fix:
            typed.append("data.path=x")
        assert compose(typed).config.model.option, fix


@pytest.mark.parametrize("name", ["FP16", "Learning-Rate", "compile=NVFuser"])
def test_case_and_dashes_do_not_matter(name: str) -> None:
    assert find_retired(name) is not None


def test_value_with_spaces_stays_one_override() -> None:
    row = find_retired("output_dir")
    assert row is not None
    assert row.overrides("a b") == ("paths.runs=a b",)
