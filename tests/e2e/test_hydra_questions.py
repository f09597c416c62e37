"""`--cfg`, `--info`, `--resolve`, `--package`: Hydra answers, or eke says in one line why not."""

import subprocess
import sys

import pytest
import yaml
from support import REPO, Finished, environment


@pytest.fixture
def ask(train_main, tmp_path):
    """A command with some flags, in an empty folder that has to stay empty."""

    def run(*words: str) -> Finished:
        done = train_main(*words)
        assert not list(tmp_path.iterdir()), "a question leaves nothing behind"
        return done

    return run


@pytest.fixture(scope="module")
def own_options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own options")
    (folder / "recipe").mkdir()
    text = "# @package _global_\n# recipe=mine -- mine.\ndefaults:\n  - low_memory\n  - _self_\n"
    (folder / "recipe" / "mine.yaml").write_text(f"{text}seed: ${{train.log_every}}\n")
    return folder


def answered(finished: Finished) -> str:
    assert finished.err == ""
    assert finished.code == 0
    return finished.out


@pytest.mark.slow
def test_cfg_prints_the_configuration(ask) -> None:
    shown = yaml.safe_load(answered(ask("--cfg", "job", "optimizer=sgd", "seed=3")))
    assert shown["optimizer"]["momentum"] == 0.9
    assert shown["seed"] == 3
    assert "hydra" not in shown
    assert set(yaml.safe_load(answered(ask("-c", "hydra")))) == {"hydra"}
    assert {"hydra", "seed"} <= set(yaml.safe_load(answered(ask("--cfg=all"))))


@pytest.mark.slow
def test_package_prints_one_section(ask) -> None:
    part = answered(ask("--cfg", "job", "--package", "optimizer", "optimizer.lr=0.5"))
    assert yaml.safe_load(part)["lr"] == 0.5
    assert answered(ask("--cfg", "job", "-p", "seed")) == "0\n"
    assert yaml.safe_load(answered(ask("--cfg", "hydra", "-p", "hydra.run"))) == {"dir": "."}


@pytest.mark.slow
def test_interpolations_are_shown_or_resolved(ask, own_options) -> None:
    asked = ("--cfg", "job", "--config-dir", str(own_options), "recipe=mine")
    assert yaml.safe_load(answered(ask(*asked)))["seed"] == "${train.log_every}"
    assert yaml.safe_load(answered(ask(*asked, "--resolve")))["seed"] == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["-i", "defaults"], "Defaults List", id="defaults"),
        pytest.param(["--info", "plugins"], "Installed Hydra Plugins", id="plugins"),
        pytest.param(["--info", "searchpath"], "schema", id="search path"),
        pytest.param(["--hydra-help", "seed=1"], "Flags", id="help"),
    ],
)
def test_info_prints_the_composition(ask, words, said) -> None:
    assert said in answered(ask(*words))


def test_user_options_are_composed(ask, own_options) -> None:
    shown = answered(ask("--info", "defaults", "--config-dir", str(own_options), "recipe=mine"))
    assert "recipe/mine" in shown
    assert "recipe/low_memory" in shown


REFUSED = [
    pytest.param("--cfg", "--cfg job", id="no value"),
    pytest.param("--cfg seed=1", "--cfg job seed=1", id="an override for a value"),
    pytest.param("-p optimizer", "--cfg job --package optimizer", id="package alone"),
    pytest.param("--cfg job --package=", "--package optimizer", id="empty package"),
    pytest.param("--cfg job -m seed=1,2", "-m seed=1,2 plan_only=true", id="a sweep"),
    pytest.param("--cfg job --config-name x", "experiment=NAME", id="other configuration"),
    pytest.param("--config-path x", "--config-dir FOLDER", id="another folder"),
    pytest.param("--experimental-rerun x.pkl", "the command in record.json", id="rerun"),
    pytest.param("--cfg job data=text", "data.path=FILE_OR_FOLDER", id="missing value"),
]


@pytest.mark.parametrize(("words", "fix"), REFUSED)
def test_unsupported_hydra_flag_has_a_fix(ask, words, fix) -> None:
    finished = ask(*words.split())
    assert finished.code == 2
    assert finished.out == ""
    assert "Traceback" not in finished.err
    assert finished.err.rstrip().endswith(f" {fix}")
    assert finished.err.count("->") == 1


@pytest.mark.slow
def test_closed_output_of_cfg_is_handled(tmp_path) -> None:
    with open("/dev/full", "w") as full:
        finished = subprocess.run(
            [sys.executable, str(REPO / "train.py"), "--cfg", "job"],
            env=environment(tmp_path), cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
    assert finished.returncode == 1
    assert finished.stderr.startswith("standard output: No space left on device")
