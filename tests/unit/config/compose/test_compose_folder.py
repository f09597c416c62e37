"""The user's own options: they compose, and mistakes in them are told with file and line."""

from pathlib import Path

import pytest

from eke.common.errors import ConfigError, Problem
from eke.config.compose import compose


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def problem_of(overrides: list[str], folder: Path) -> Problem:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, folder)
    (problem,) = caught.value.problems
    return problem


@pytest.fixture(params=["plain", "with space", "quo'te\"s", "\u00fcn\u00ef"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    path.mkdir()
    return path


def test_user_experiment_composes(folder: Path) -> None:
    write(folder, "experiment/mine.yaml", "# @package _global_\ntrain:\n  steps: 7\n")
    composed = compose(["experiment=mine"], folder)
    assert composed.config.train.steps == 7
    assert composed.choices["experiment"] == "mine"


EXPERIMENT = "# @package _global_\n"
BROKEN = [
    pytest.param("train: [1\nseed: 2\n", 3, "wrong_file", "", id="bracket"),
    pytest.param("train:\n  steps: 1\n  steps: 2\n", 4, "wrong_file", "", id="twice"),
    pytest.param("train:\n  stepz: 1\n", 3, "wrong_file", "write train.steps", id="unknown key"),
    pytest.param("train:\n  steps: abc\n", 3, "wrong_file", "write steps: null", id="type"),
    pytest.param("precision:\n  tf32: off\n", 3, "wrong_file", 'write tf32: "off"', id="bare off"),
    pytest.param(
        "defaults:\n  - override /precision: bf17\n",
        3,
        "unknown_option",
        "write precision: bf16",
        id="option",
    ),
    pytest.param("- a\n", 1, "wrong_file", "", id="a list"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "line", "kind", "fix"), BROKEN)
def test_mistake_in_a_file_is_reported_with_its_line(
    tmp_path: Path, text: str, line: int, kind: str, fix: str
) -> None:
    path = write(tmp_path, "experiment/mine.yaml", EXPERIMENT + text)
    problem = problem_of(["experiment=mine", "seed=1"], tmp_path)
    assert (problem.key, problem.id) == (f"{path}:{line}", kind)
    assert fix in str(problem.fix)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "train:\n  steps: 7\n", "seed: 1\n# @package _global_\n"])
def test_experiment_without_package_header_is_reported(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, "experiment/mine.yaml", text)
    problem = problem_of(["experiment=mine"], tmp_path)
    assert (problem.key, str(problem.fix)) == (f"{path}:1", "write # @package _global_")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "lr: 0.1\n", "momentum: 0.5\n"])
def test_option_file_without_schema_has_a_fix(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, "optimizer/mine.yaml", text)
    problem = problem_of(["optimizer=mine"], tmp_path)
    assert problem.key == f"{path}:1"
    assert "sgd" in problem.why
    fix = str(problem.fix).removeprefix("write ")
    assert fix.startswith("defaults: [/schema/optimizer/")
    path.write_text(f"{fix}\nlr: 0.5\n")
    assert compose(["optimizer=mine"], tmp_path).config.optimizer.lr == 0.5


def test_defaults_without_schema_are_rejected(tmp_path: Path) -> None:
    write(tmp_path, "optimizer/mine.yaml", "defaults:\n  - _self_\nlr: 0.1\n")
    problem = problem_of(["optimizer=mine"], tmp_path)
    assert (problem.key, problem.value, problem.id) == ("optimizer", "mine", "wrong_file")


def test_config_folder_that_contains_runs(tmp_path: Path) -> None:
    """`--config-dir .`: the files of a run are no options, nor are those of anything so deep."""
    write(tmp_path, "runs/0c5a8c16148b9d5c/config.yaml", "seed: 1\n")
    write(tmp_path, "experiment/mine.yaml", EXPERIMENT)
    compose(["experiment=mine"], tmp_path)
    write(tmp_path, "experiment/papers/yours.yml", EXPERIMENT)
    assert problem_of([], tmp_path).id == "wrong_file"


def test_missing_config_folder_is_rejected(tmp_path: Path) -> None:
    assert problem_of([], tmp_path / "x").id == "missing_folder"
    assert problem_of([], write(tmp_path, "x", "")).id == "missing_folder"


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        pytest.param("experimnt/a.yaml", "mv experimnt experiment", id="group"),
        pytest.param(
            "experiment/smoke.yaml",
            "mv experiment/smoke.yaml experiment/my_smoke.yaml",
            id="shadowed",
        ),
        pytest.param("a.yaml", "mv a.yaml experiment/a.yaml", id="no group"),
        pytest.param("experiment/a.yml", "mv a.yml a.yaml", id="yml"),
    ],
)
def test_file_without_effect_is_reported(tmp_path: Path, name: str, fix: str) -> None:
    write(tmp_path, name, EXPERIMENT)
    problem = problem_of([], tmp_path)
    assert (problem.id, str(problem.fix)) == ("wrong_file", fix)


OPTIONS = [
    pytest.param("optimizer", "adamw", "nosuch", 3, id="optimizer"),
    pytest.param("optimizer", "adamw", "sgd", 3, id="one with other keys"),
    pytest.param("optimizer", "adamw", "mine", 3, id="a name of its own"),
    pytest.param("attention", "eager", "nosuch", 3, id="attention"),
    pytest.param("precision", "bf16", "nosuch", 3, id="precision"),
    pytest.param("tracker", "none", "wandbb", 3, id="tracker"),
]


@pytest.mark.parametrize(("group", "base", "option", "line"), OPTIONS)
def test_unknown_option_in_a_file_is_rejected(tmp_path, group, base, option, line) -> None:
    text = f"defaults: [{base}, _self_]\n# mine.\noption: {option}\n"
    write(tmp_path, f"{group}/mine.yaml", text)
    with pytest.raises(ConfigError) as caught:
        compose([f"{group}=mine"], tmp_path)
    (problem,) = caught.value.problems
    assert problem.key == f"{tmp_path / group / 'mine.yaml'}:{line}"
    mended = str(problem.fix).removeprefix("write option: ")
    write(tmp_path, f"{group}/mine.yaml", text.replace(f"option: {option}", f"option: {mended}"))
    assert compose([f"{group}=mine"], tmp_path).overrides == (f"{group}=mine",)


def test_unknown_option_in_an_experiment_is_reported(tmp_path) -> None:
    write(tmp_path, "experiment/mine.yaml", EXPERIMENT + "optimizer:\n  option: nosuch\n")
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=mine"], tmp_path)
    assert caught.value.problems[0].key == f"{tmp_path / 'experiment' / 'mine.yaml'}:3"


@pytest.mark.parametrize("group", ["model", "precision", "slurm"])
def test_preset_option_may_have_the_name_of_its_file(tmp_path, group) -> None:
    base = {"model": "tiny", "precision": "bf16", "slurm": "default"}[group]
    write(tmp_path, f"{group}/mine.yaml", f"defaults: [{base}, _self_]\noption: mine\n")
    assert getattr(compose([f"{group}=mine"], tmp_path).config, group).option == "mine"
