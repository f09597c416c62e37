"""Settings of Hydra's own have an effect, or are refused with the key that has it."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from eke.common.errors import ConfigError
from eke.config.compose import compose
from eke.config.compose import hydra as compose_hydra
from eke.config.sweep import expand

TOP = "# @package _global_\n"


def refused(typed, folder=None, sweep=False):
    with pytest.raises(ConfigError) as caught:
        (expand if sweep else compose)(typed, folder)
    return caught.value.problems


ALL = sorted(f"hydra.{name}" for name in OmegaConf.structured(HydraConf) if name != "defaults")


@pytest.mark.parametrize("sweep", [False, True], ids=["run", "sweep"])
@pytest.mark.parametrize("key", [k for k in ALL if k not in ("hydra.launcher", "hydra.sweeper")])
def test_every_hydra_setting_is_applied_or_rejected(key, sweep) -> None:
    """Asked of Hydra's own schema, so that one that it gets later is covered."""
    (problem,) = refused([f"++{key}=1"], sweep=sweep)
    assert problem.key == key


INSTEAD = [
    pytest.param("hydra.run.dir=elsewhere", "paths.runs=elsewhere", id="run folder"),
    pytest.param("hydra.sweep.dir=elsewhere", "paths.runs=elsewhere", id="sweep folder"),
    pytest.param("hydra.run.dir=out/${now:%Y}", "paths.runs=FOLDER", id="interpolated"),
    pytest.param("hydra.job.chdir=true", "", id="chdir"),
    pytest.param("hydra.verbose=true", "", id="verbose"),
    pytest.param("hydra/job_logging=disabled", "", id="a group"),
    pytest.param("hydra.verbose=true,false", "", id="swept"),
]


@pytest.mark.parametrize("sweep", [False, True], ids=["run", "sweep"])
@pytest.mark.parametrize(("typed", "fix"), INSTEAD)
def test_equivalent_eke_key_is_proposed(typed, fix, sweep) -> None:
    (problem,) = refused([typed], sweep=sweep)
    assert str(problem.fix) == fix
    assert problem.id == "hydra_setting"
    if fix.startswith("paths.runs=e"):
        assert compose([fix]).config.paths.runs == "elsewhere"


def test_redundant_hydra_mode_is_accepted_with_m() -> None:
    cells = expand(["hydra.mode=MULTIRUN", "seed=1,2"]).cells
    assert [cell.overrides for cell in cells] == [("seed=1",), ("seed=2",)]
    assert refused(["hydra.mode=RUN", "seed=1,2"], sweep=True)[0].key == "hydra.mode"


def write(folder: Path, text: str, name: str = "mine") -> Path:
    file = folder / "experiment" / f"{name}.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(TOP + text)
    return file


FILES = [
    pytest.param("hydra:\n  run:\n    dir: away\n", 4, "hydra.run.dir: away", "paths.runs=away",
                 id="folder"),
    pytest.param("hydra:\n  job: {chdir: true}\n", 3, "hydra.job.chdir: true", "delete this line",
                 id="chdir"),
    pytest.param("defaults:\n  - override /hydra/launcher: slurm\n", 3, "hydra/launcher: slurm",
                 "delete this line", id="eke's launcher"),
    pytest.param("defaults:\n  - override /hydra/sweeper: eke\n", 3, "hydra/sweeper: eke",
                 "delete this line", id="sweeper"),
    pytest.param("hydra:\n  sweeper:\n    params:\n      seed: 1,2\n", 5,
                 "hydra.sweeper.params.seed: 1,2", "sweep.product=", id="params"),
]  # fmt: skip


@pytest.mark.parametrize(
    "sweep",
    [pytest.param(False, id="run"), pytest.param(True, id="sweep", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(("text", "line", "value", "fix"), FILES)
def test_hydra_setting_in_a_file_is_reported_with_its_line(
    tmp_path, text, line, value, fix, sweep
) -> None:
    write(tmp_path, "# hydra: not this file\nseed: 3\n", "another")
    file = write(tmp_path, text)
    (problem,) = refused(["experiment=mine"], tmp_path, sweep)
    assert (problem.key, problem.value) == (f"{file}:{line}", value)
    assert fix in str(problem.fix)


def test_file_that_only_mentions_hydra_is_accepted(tmp_path) -> None:
    write(tmp_path, "# no hydra here\nseed: 3\n")
    assert compose(["experiment=mine"], tmp_path).config.seed == 3


def test_hydra_settings_are_accepted_inside_a_hydra_job(tmp_path, monkeypatch) -> None:
    """A sweep of Hydra's own (`hydra/launcher=joblib`) has made that folder."""
    write(tmp_path, "hydra:\n  sweep:\n    dir: away\nseed: 3\n")
    monkeypatch.setattr(HydraConfig, "initialized", lambda: True)
    assert compose(["experiment=mine"], tmp_path, in_sweep=True).config.seed == 3


def test_failing_plugin_is_one_problem(monkeypatch) -> None:
    def fail(*_) -> None:
        raise RuntimeError("no srun here\nare you on a cluster?") from ValueError()

    monkeypatch.setattr(compose_hydra, "_run_hydra", fail)
    with pytest.raises(ConfigError) as caught:
        compose_hydra.sweep_by_hydra(["hydra/launcher=basic", "seed=1"], None, lambda *_: 0.0)
    (problem,) = caught.value.problems
    assert problem.key == "hydra/launcher=basic"
    assert problem.why == "no srun here"


def test_error_inside_a_job_is_not_changed(monkeypatch) -> None:
    """A mistake of eke's own keeps its traceback."""

    def job(*_) -> float:
        raise KeyError("a fault in eke")

    monkeypatch.setattr(compose_hydra, "HydraConfig", MagicMock())
    monkeypatch.setattr(compose_hydra, "_run_hydra", lambda *parts: parts[-1](None))
    with pytest.raises(KeyError, match="a fault in eke"):
        compose_hydra.sweep_by_hydra(["hydra/launcher=basic", "seed=1"], None, job)
