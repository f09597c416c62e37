"""The sweep in sweeps/wandb, run by W&B's own agent; what its server would choose, the tests do."""

import os
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from live import SHORT, record_of, rows_of, run_folders
from support import PATIENCE_S, REPO, environment
from unit.results.trackers.stub import serving

from eke.common.errors import ConfigError
from eke.config.compose import compose, split_arguments
from eke.config.compose.catalogue import make_catalogue
from eke.config.compose.completion import candidates
from eke.plan.planner import plan_to_plain
from eke.plan.record import metrics
from eke.results.trackers.wandb import make_config

FILES = sorted((REPO / "sweeps" / "wandb").glob("*.yaml"))
IDS = [file.stem for file in FILES]
SWEEP = "sw33p1d0"
RUN = "ag3ntrun"


def choices(sweep: dict, last: bool) -> dict[str, object]:
    """One value of each parameter: its first or lowest, or its last or highest."""
    values = {}
    for name, parameter in sweep["parameters"].items():
        ends = parameter.get("values") or [parameter["min"], parameter["max"]]
        values[name] = ends[-1 if last else 0]
    return values


def command(values: dict[str, object]) -> dict:
    """What the server sends to an agent."""
    args = {name: {"value": value} for name, value in values.items()}
    return {"type": "run", "run_id": RUN, "program": "train.py", "args": args}


def test_sweep_file_has_an_example() -> None:
    assert FILES


def agent_arguments(of: dict[str, object]) -> dict[str, list[str]]:
    """The words of a command by the agent's own function, as of wandb 0.31."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args  # imports for seconds

    return create_sweep_command_args(of)


@pytest.mark.parametrize("file", FILES, ids=IDS)
@pytest.mark.parametrize("last", [False, True], ids=["lowest", "highest"])
def test_command_of_a_wandb_agent_composes(file: Path, last: bool) -> None:
    sweep = yaml.safe_load(file.read_text())  # as `wandb sweep` reads it
    values = choices(sweep, last) | {"plan_only": True}
    said = agent_arguments(command(values))
    macros = {"${env}", "${interpreter}", "${program}"}
    words = [word for word in sweep["command"] if word not in macros]
    at = words.index("${args_no_hyphens}")
    words[at : at + 1] = said["args_no_hyphens"]
    config = compose(words).config
    assert config.plan_only
    assert config.tracker.mode.value == "online"
    for name, value in values.items():
        section, _, key = name.partition(".")
        node = getattr(config, section)
        found = getattr(node, key) if key else getattr(node, "option", node)
        assert found == value, name


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_wandb_sweep_minimizes_eval_loss(file: Path) -> None:
    sweep = yaml.safe_load(file.read_text())
    assert sweep["metric"] == {"name": metrics.EVAL_LOSS, "goal": "minimize"}
    assert (REPO / sweep["program"]).is_file()


def test_wandb_file_is_not_a_sweep_option() -> None:
    assert not {"wandb", *IDS} & set(make_catalogue().options["sweep"])
    offered = set(candidates(["-m"], "sweep="))
    assert "sweep=precision_ladder" in offered
    assert not [text for text in offered if "wandb" in text]


@pytest.mark.parametrize("form", ["args", "args_no_hyphens", "args_override_hydra"])
def test_restart_with_logged_configuration_names_the_command(form, make_plan) -> None:
    """W&B's agent starts a run again with all that it has logged: wandb/wandb#9143."""
    plan = make_plan("model=tiny", "data=synthetic", "optimizer.lr=0.002")
    logged = make_config({**plan.choices, "device": "NVIDIA L4"}, plan_to_plain(plan)["config"])
    said = agent_arguments(command({"optimizer.lr": 0.002, **logged}))
    with pytest.raises(ConfigError) as refused:
        compose(split_arguments(said[form]).overrides)
    (problem,) = refused.value.problems
    words = shlex.split(problem.fix.remark)[2:]
    assert compose(words).config.optimizer.lr == 0.002
    assert compose(words).config.model.option == "tiny"


@pytest.fixture
def of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with an account, whose environment an agent may change."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "ab" * 20)
    monkeypatch.setenv("WANDB_SWEEP_ID", SWEEP)
    for name in ("WANDB_DIR", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(name, "")  # so that what the agent writes is taken back
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    (tmp_path / "train.py").symlink_to(REPO / "train.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_agents_run_is_in_its_sweep(file: Path, of_a_user: Path, monkeypatch) -> None:
    from wandb.wandb_agent import Agent

    sweep = yaml.safe_load(file.read_text())
    short = dict(word.split("=", 1) for word in SHORT if not word.startswith("tracker"))
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        agent = Agent(api=None, queue=None, sweep_id=SWEEP)
        agent._sweep_command = sweep["command"]  # which `run` takes from the server
        answer = agent._process_command(command(choices(sweep, last=False) | short))
        assert "exception" not in answer, answer
        assert agent._run_processes[RUN].wait(PATIENCE_S) == 0
        (folder,) = run_folders(of_a_user)
        assert not [w for w in record_of(folder)["warnings"] if "tracker" in w]
        assert list(server.runs) == [RUN], "the id that W&B has given it, not eke's"
        assert server.runs[RUN]["sweep"] == SWEEP
        told = [row[metrics.EVAL_LOSS] for row in server.rows[RUN] if metrics.EVAL_LOSS in row]
        known = [row[metrics.EVAL_LOSS] for row in rows_of(folder) if metrics.EVAL_LOSS in row]
        assert told == known != []
