"""The batch script: its text, what bash makes of it, and what it does when srun has ended."""

import os
import subprocess
import sys

import pytest
from support import REPO

import eke.launch.slurm.submission_file as script_module
from eke.config.schema.resources import GpuRequest
from eke.launch.slurm.submission_file import make_request, script_text

GOLDEN = REPO / "tests" / "unit" / "launch" / "slurm" / "golden"

CASES = {
    "cpu": {"resources.time": "2:00:00", "resources.cpus": 4},
    "gpu_gres": {
        "resources.gpus": 2,
        "resources.memory": "64G",
        "resources.constraint": "a100&nvlink",
        "slurm.gpu_request": GpuRequest.gres,
        "slurm.gpu_type": "a100",
        "slurm.partition": "long",
        "slurm.account": "project 7",
        "slurm.max_parallel": 2,
    },
    "two_nodes": {
        "distributed.option": "ddp",
        "distributed.num_processes": 8,
        "distributed.num_nodes": 2,
        "resources.gpus": 1,
        "resources.cpus": 6,
    },
    "profile": {
        "resources.gpus": 1,
        "slurm.setup": ["set -euo pipefail", "module load cuda/12.8", "ulimit -n 65536"],
        "slurm.command_prefix": 'apptainer exec --nv "$HOME/eke image.sif"',
        "slurm.python": "python",
        "slurm.options": {"exclusive": "", "mail-user": "me@example.org", "comment": "it's #1"},
        "slurm.srun": ["--cpu-bind=cores"],
        "slurm.grace_s": 300,
    },
}


@pytest.fixture
def text_of(plan_with, tmp_path, monkeypatch):
    """Values -> the batch script of an array of three."""
    monkeypatch.setattr(sys, "executable", "/opt/venv/bin/python")
    monkeypatch.setattr(script_module, "source_folder", lambda: "/opt/eke/src")

    def make(values=None, folder=None, num_runs=3):
        plan = plan_with(values, processes=(values or {}).get("distributed.num_processes", 1))
        path = (folder or tmp_path) / "eke-0123456789ab-00000000.json"
        request = make_request(plan)
        return script_text(request, plan.config.slurm, path.stem, path, num_runs)

    return make


@pytest.mark.parametrize("case", CASES)
def test_script_matches_golden_text(case, text_of, tmp_path) -> None:
    text = text_of(CASES[case]).replace(str(tmp_path), "/runs/sweep-0123456789ab/slurm") + "\n"
    golden = GOLDEN / f"{case}.sbatch"
    if os.environ.get("EKE_UPDATE"):
        golden.write_text(text)
    assert text == golden.read_text(), "run EKE_UPDATE=1 pytest on this file, and look at it"


# --- as bash runs it ------------------------------------------------------------------------------

SRUN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do   # srun's own options
  case "$1" in --output) echo "$2" >> {folder}/output; shift;; esac
  shift
done
printf '%s\\n' "$@" > {folder}/started
env > {folder}/environment
exit {code}
"""


@pytest.fixture
def run(stubs, tmp_path):
    """Run a script as an element of an array; returns its exit code."""

    def run(text: str, code: int = 0, state: str = "RUNNING", requeue: int = 0) -> int:
        stubs.write(
            "srun", SRUN.replace("{folder}", str(stubs.folder)).replace("{code}", str(code))
        )
        answer = f'case "$1" in requeue) exit {requeue};; esac'
        line = f"JobId=9 ArrayJobId=5 ArrayTaskId=3 JobState={state} Reason=None\n"
        stubs.say("scontrol", line, run=answer)
        stubs.write("sleep", "#!/bin/sh\n")
        job = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "5"}
        environment = {**os.environ, **job, "SLURM_CPUS_PER_TASK": "4", "HOME": "/home/me"}
        done = subprocess.run(["bash"], input=text, text=True, env=environment, cwd=tmp_path)
        return done.returncode

    return run


ODD = 'a b it\'s "quoted" $(touch injected) `touch injected`;touch injected; ä*?'


def test_unusual_paths_are_quoted(text_of, run, stubs, tmp_path) -> None:
    folder = tmp_path / "runs" / ODD
    folder.mkdir(parents=True)
    assert run(text_of(folder=folder)) == 0
    started = (stubs.folder / "started").read_text().splitlines()
    path = str(folder / "eke-0123456789ab-00000000.json")
    assert started == ["/opt/venv/bin/python", "-P", "-u", "-m", "eke.launch.slurm.watcher", path]
    assert (stubs.folder / "output").read_text().splitlines()[
        -1
    ] == f"{folder}/eke-0123456789ab-00000000_%a.log"
    assert not list(tmp_path.rglob("injected"))


def test_percent_sign_in_a_path_is_escaped(text_of, tmp_path) -> None:
    lines = text_of(folder=tmp_path / "100%a").splitlines()
    assert f"#SBATCH --output={tmp_path}/100%%a/eke-0123456789ab-00000000_%a.log" in lines


def test_prefix_is_parsed_by_a_shell(text_of, run, stubs) -> None:
    text = text_of(CASES["profile"] | {"slurm.setup": ["export GREETING='hello you'"]})
    assert run(text) == 0
    started = (stubs.folder / "started").read_text().splitlines()
    assert started[:4] == ["apptainer", "exec", "--nv", "/home/me/eke image.sif"]
    environment = (stubs.folder / "environment").read_text().splitlines()
    assert "GREETING=hello you" in environment
    assert "SRUN_CPUS_PER_TASK=4" in environment
    assert any(line.startswith("PYTHONPATH=/opt/eke/src") for line in environment)


@pytest.mark.parametrize(
    ("given", "kept"),
    [("", ""), (":", ""), ("/x::.:a/b", ":/x"), ("/a b:/c*", ":/a b:/c*")],
)
def test_current_folder_is_not_on_the_import_path(given, kept, text_of, run, stubs) -> None:
    assert run(text_of({"slurm.setup": [f"export PYTHONPATH='{given}'"]})) == 0
    environment = (stubs.folder / "environment").read_text().splitlines()
    assert f"PYTHONPATH=/opt/eke/src{kept}" in environment
    assert "PYTHONSAFEPATH=1" in environment


REQUEUE = "scontrol requeue 5_3"
STRICT = ["set -euo pipefail"]


@pytest.mark.parametrize(
    ("code", "state", "ends", "requeued", "setup"),
    [
        pytest.param(0, "RUNNING", 0, False, [], id="ok"),
        pytest.param(75, "RUNNING", 75, False, [], id="resumable"),
        pytest.param(137, "RUNNING", 137, False, STRICT, id="killed"),
        pytest.param(99, "RUNNING", 75, True, [], id="again"),
        pytest.param(99, "RUNNING", 75, True, STRICT, id="again, strict"),
        pytest.param(99, "COMPLETING", 75, False, STRICT, id="cancelled"),
        pytest.param(99, "PENDING", 75, False, [], id="put back already"),
    ],
)
def test_srun_result_sets_exit_code_and_requeue(
    code, state, ends, requeued, setup, text_of, run, stubs
) -> None:
    assert run(text_of({"slurm.setup": setup}), code, state) == ends
    assert (REQUEUE in stubs.calls()) is requeued
    asked = [call for call in stubs.calls("scontrol") if "requeue" in call]
    assert all(call == REQUEUE for call in asked), "the bare id of an array is all of it"


def test_failed_requeue_exits_as_resumable(text_of, run, stubs) -> None:
    assert run(text_of(), 99, requeue=1) == 75
    assert REQUEUE in stubs.calls()


def test_failed_strict_setup_starts_no_run(text_of, run, stubs) -> None:
    assert run(text_of({"slurm.setup": ["set -e", "false"]})) == 1
    assert not (stubs.folder / "started").exists()


def test_sigterm_waits_for_the_run(text_of, stubs, run) -> None:
    """Scancel reaches every process of a job; the shell has to stay until srun is back."""
    text = text_of().replace("srun --unbuffered", "kill -TERM $$; srun --unbuffered")
    assert run(text, code=3) == 3
