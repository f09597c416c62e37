"""docs/techniques.md and docs/rules.md say what the code says; `EKE_UPDATE=1` rewrites them."""

import os

import pytest
from reference.published import ROWS
from reference.rules_page import rules_page
from reference.techniques import techniques_page
from support import REPO

from eke.compose import compose


def compare(name: str, fresh: str) -> None:
    page = REPO / "docs" / name
    if os.environ.get("EKE_UPDATE"):
        page.write_text(fresh)
    else:
        assert fresh == page.read_text(), "run EKE_UPDATE=1 pytest tests/conf/test_reference.py"


def test_techniques() -> None:
    compare("techniques.md", techniques_page(REPO / "results"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.technique)
def test_the_guides_rows_are_commands_that_compose(row) -> None:
    compose(["experiment=guide_single_gpu", *row.overrides.split()])


@pytest.mark.slow
def test_rules(tmp_path) -> None:
    compare("rules.md", rules_page(tmp_path))
