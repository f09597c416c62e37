"""Files and folders that were probably meant."""

from pathlib import Path

import pytest

from eke.common.errors import ConfigError
from eke.common.text import closest_path, suggest_match
from eke.data.sources.source_files import find_files
from eke.models.checkpoints.locate import locate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("my_data.jsonl", "zoo of rows.csv", ".my_dat"):
        (tmp_path / name).touch()
    for name in ("my_model", "my_notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "my_model" / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("my_dat.jsonl", "my_data.jsonl"),
        ("My-Data.jsonl", "my_data.jsonl"),
        ("zzz", None),
        ("zoo of rows.cs", "zoo of rows.csv"),
        ("nowhere/my_data.jsonl", None),
        ("null\0/my_data.jsonl", None),
    ],
    ids=["near", "case and dash", "far", "in quotes only", "no folder", "no path"],
)
def test_similar_path_of_a_missing_file_is_found(folder, typed, meant) -> None:
    assert closest_path(folder / typed) == (folder / meant if meant else None)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("a100", (None,)),
        ("A100-8", ("a100_80",)),
        ("v10", ("v100_16",)),
        ("v010_16", ("v100_16",)),
        ("b100", (None,)),
    ],
)
def test_unique_prefix_or_typo_of_a_name_is_found(typed, meant) -> None:
    assert suggest_match(typed, ["a100_40", "a100_80", "h100", "h200", "v100_16"]) in meant


def test_similar_file_is_proposed(folder) -> None:
    with pytest.raises(ConfigError) as caught:
        find_files("jsonl", "data.path", str(folder / "my_dat.jsonl"), None)
    (problem,) = caught.value.problems
    assert str(problem.fix) == f"data.path={folder / 'my_data.jsonl'}"


@pytest.mark.parametrize(
    ("typed", "proposed"),
    [("my_modell", "/my_model"), ("my_note", "ANOTHER_FOLDER_OR_HUB_NAME")],
    ids=["checkpoint", "no checkpoint"],
)
def test_similar_checkpoint_is_proposed(folder, typed, proposed) -> None:
    with pytest.raises(ConfigError) as caught:
        locate(str(folder / typed), None)
    assert str(caught.value.problems[0].fix).endswith(proposed)
