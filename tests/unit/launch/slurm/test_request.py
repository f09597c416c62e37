"""What is asked of SLURM: sbatch's own forms, who comes first, no text of more than one line."""

from dataclasses import replace

import pytest

from eke.common.errors import ConfigError
from eke.launch.slurm.submission_file import make_request, read_minutes

TIMES = {
    "90": 90, "1:00": 1, "1:01": 2, "0:30": 1, "2:00:00": 120, "00:00:01": 1, "0:59:59": 60,
    "1-0": 1440, "2-3": 3060, "1-2:30": 1590, "1-2:30:15": 1591, "7-00:00:00": 10080, " 5 ": 5,
}  # fmt: skip
NO_TIMES = [
    "", "0", "0:00", "-5", "1h", "1:00:00:00", "1-", "-1:00", "1.5", "INFINITE", "UNLIMITED",
    "1-2-3", "5\n6", "٣", "1:00 #SBATCH",
]  # fmt: skip


def test_time_limits_are_read_like_sbatch() -> None:
    assert {text: read_minutes(text) for text in TIMES} == TIMES


def test_invalid_time_limit_is_rejected(plan_with) -> None:
    assert [text for text in NO_TIMES if read_minutes(text) is not None] == []
    with pytest.raises(ConfigError, match=r"resources\.time"):
        make_request(plan_with({"resources.time": "1h"}))


def test_time_limit_within_the_grace_period_is_rejected(plan_with) -> None:
    with pytest.raises(ConfigError, match=r"slurm\.grace_s=120") as caught:
        make_request(plan_with({"resources.time": "2"}))
    assert str(caught.value.problems[0].fix) == "resources.time=7"
    assert make_request(plan_with({"resources.time": "7"})).minutes == 7


def test_memory_is_read_like_sbatch(plan_with) -> None:
    for text in ("64G", "64g", "512M", "2048", "1T", "100K", "64GB", "0"):
        assert make_request(plan_with({"resources.memory": text})).memory == text


@pytest.mark.parametrize(
    "text", ["64 G", "G", "1.5G", "-1", "64G\n", "64GiB", "all", "٣G"], ids=ascii
)
def test_invalid_memory_request_is_rejected(text, plan_with) -> None:
    with pytest.raises(ConfigError, match=r"resources\.memory"):
        make_request(plan_with({"resources.memory": text}))


@pytest.mark.parametrize(
    ("values", "processes", "kind", "gpus", "cpus"),
    [
        pytest.param({}, 1, "cpu", 0, 1, id="cpu"),
        pytest.param({}, 4, "cpu", 0, 4, id="cpu, 4 processes"),
        pytest.param({}, 1, "cuda", 1, 1, id="cuda"),
        pytest.param({"resources.cpus": 8}, 4, "cuda", 4, 32, id="cuda, 4 processes"),
        pytest.param({"resources.gpus": 0}, 1, "cuda", 0, 1, id="none wanted"),
        pytest.param({"resources.gpus": 2}, 2, "cuda", 4, 2, id="two each"),
        pytest.param({"resources.gpus": 1}, 1, "cpu", 1, 1, id="cpu with a GPU"),
    ],
)
def test_gpus_and_cores_cover_all_processes(values, processes, kind, gpus, cpus, plan_with) -> None:
    request = make_request(plan_with({"resources.time": "3:00:00", **values}, processes, kind))
    assert (request.gpus, request.cpus) == (gpus, cpus)
    assert request.gpu_hours == 3 * gpus


def test_devices_of_one_process_are_counted(plan_with) -> None:
    plan = plan_with(kind="cuda")
    plan = replace(plan, batch=replace(plan.batch, devices=4))
    assert make_request(plan).gpus == 4


@pytest.mark.parametrize("name", ["partition", "account", "qos", "constraint"])
def test_resources_override_the_profile(name, plan_with) -> None:
    profile, own = {f"slurm.{name}": "theirs"}, {f"resources.{name}": "mine"}
    assert getattr(make_request(plan_with()), name) == ""
    assert getattr(make_request(plan_with(profile)), name) == "theirs"
    assert getattr(make_request(plan_with(profile | own)), name) == "mine"


EVIL = "x{end}#SBATCH --uid=root{end}rm -rf ~"
LINES = {
    **{f"resources.{n}": EVIL for n in ("partition", "account", "qos", "constraint")},
    **{f"slurm.{n}": EVIL for n in ("partition", "account", "qos", "constraint")},
    **{f"slurm.{n}": EVIL for n in ("gpu_type", "python", "command_prefix")},
    "slurm.setup": ["module load x", EVIL],
    "slurm.srun": [EVIL],
    "slurm.options": {"comment": EVIL},
    "paths.runs": EVIL,
}


@pytest.mark.parametrize(
    ("path", "end"),
    [*((path, "\n") for path in LINES), ("paths.runs", "\r"), ("slurm.setup", "\0")],
    ids=ascii,
)
def test_multi_line_value_is_rejected(path, end, plan_with) -> None:
    value = LINES[path]
    if isinstance(value, dict):
        value = {name: text.format(end=end) for name, text in value.items()}
    elif isinstance(value, list):
        value = [text.format(end=end) for text in value]
    else:
        value = value.format(end=end)
    with pytest.raises(ConfigError, match="must be one line") as caught:
        make_request(plan_with({path: value}))
    assert [p.key for p in caught.value.problems] == [path]


def test_newline_in_the_current_folder_is_rejected(plan_with, tmp_path, monkeypatch) -> None:
    (tmp_path / "a\nb").mkdir()
    monkeypatch.chdir(tmp_path / "a\nb")
    with pytest.raises(ConfigError, match=r"paths\.runs"):
        make_request(plan_with())


def test_indented_shell_line_is_accepted(plan_with) -> None:
    make_request(plan_with({"slurm.setup": ["if true; then", "\tulimit -n 4096", "fi"]}))


@pytest.mark.parametrize(
    "name", ["Comment", "comment=x", "comment x", "-J", "--comment", "comment\n", "", "über"]
)
def test_options_use_long_names(name, plan_with) -> None:
    with pytest.raises(ConfigError, match=r"slurm\.options"):
        make_request(plan_with({"slurm.options": {name: "x"}}))


@pytest.mark.parametrize(
    ("name", "fix"),
    [("time", "resources.time"), ("gres", "resources.gpus"), ("array", ""), ("job-name", "")],
)
def test_options_set_by_eke_are_rejected(name, fix, plan_with) -> None:
    with pytest.raises(ConfigError, match="is set by eke") as caught:
        make_request(plan_with({"slurm.options": {name: "5"}}))
    assert str(caught.value.problems[0].fix) == fix


def test_all_invalid_requests_are_reported(plan_with) -> None:
    values = {"resources.time": "soon", "resources.memory": "much", "slurm.python": "a\nb"}
    with pytest.raises(ConfigError, match="3 problems"):
        make_request(plan_with(values))
