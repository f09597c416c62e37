"""What the design notes claim to be tested is."""

import re

import pytest
from support import REPO

NOTE = REPO / "notes" / "slurm.md"


def test_every_behaviour_has_a_row() -> None:
    rows = re.findall(r"^\| (\d+) \|", NOTE.read_text(), flags=re.MULTILINE)
    assert [int(row) for row in rows] == list(range(1, 34))


@pytest.mark.parametrize("row", re.findall(r"^\| \d+ \|.*$", NOTE.read_text(), flags=re.MULTILINE))
def test_named_tests_exist(row) -> None:
    named = re.findall(r"`(test_\w+)`", row)
    files = re.findall(r"(?:tests|benchmarks)/[\w/]+\.py", row)
    assert named or files
    text = "\n".join(path.read_text() for path in (REPO / "tests").rglob("test_*.py"))
    for name in named:
        assert re.search(rf"def {name}\b", text), name
    for file in files:
        assert (REPO / file).exists(), file
