"""`python train.py -m hydra/launcher=slurm`: what is refused, shown and warned of before sbatch."""

import sys

import pytest

from eke import workflows
from eke.common.errors import EkeError
from eke.common.text import GIB
from eke.config.schema import unused_cluster_overrides
from eke.hardware import Device
from eke.launch.interface import find_launcher
from eke.launch.slurm import scheduler
from eke.launch.slurm.scheduler import SubmissionRefused
from eke.plan.record import Outcome

SMALL = (
    *("data=synthetic", "data.seq_len=32", "data.num_samples=64", "train.steps=20"),
    "tracker=none",
)
SLURM = ("-m", "hydra/launcher=slurm", *SMALL, "seed=0,1")


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """No cluster: every question is noted and fails."""
    found = []

    def ask(command, descriptors=()):
        found.append(command[0])
        raise EkeError(f"{command[0]} is not there")

    monkeypatch.setattr(scheduler, "run_slurm_command", ask)
    return found


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys, asked):
    """Type a command; returns its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = workflows.main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def no_gpu(monkeypatch):
    """This machine has none."""
    cpu = Device(kind="cpu", name="test cpu", memory_bytes=8 * GIB)
    monkeypatch.setattr(sys.modules["eke.hardware.cpu"], "detect", lambda: cpu)


def test_slurm_without_local_gpu_requires_hardware(typed, no_gpu, tmp_path, asked):
    code, out, _ = typed(*SLURM)
    assert code == 2
    assert "-> hardware=" in out
    assert "hardware=h100 " in out
    assert asked == []


@pytest.mark.parametrize(("hardware", "wants"), [("h100", "--gpus-per-node=1"), ("cpu", "")])
def test_slurm_dry_run_prints_scripts_without_submission(
    hardware, wants, typed, no_gpu, tmp_path, asked
) -> None:
    code, out, err = typed(*SLURM, f"hardware={hardware}", "plan_only=true")
    assert code == 0, err
    assert out.count("#!/bin/bash") == 1
    assert "#SBATCH --array=0-1%2" in out
    assert wants in out
    assert bool(wants) is ("gpus" in out)
    assert out.rstrip().endswith("Nothing was submitted")
    assert asked == ["scontrol", "sbatch"], "for the size of arrays, and whether it would be taken"
    assert not (tmp_path / "runs").exists()


def test_time_limit_invalid_for_sbatch_rejects_the_run(typed, no_gpu) -> None:
    more = ("resources.time=soon", "resources.partition=spot", "plan_only=true")
    code, out, _ = typed(*SLURM, "hardware=cpu", *more)
    assert code == 0
    assert "resources.time = soon" in out
    assert "#!/bin/bash" not in out


def test_missing_cluster_starts_no_run(typed, no_gpu, tmp_path) -> None:
    code, _, err = typed(*SLURM, "hardware=cpu")
    assert code == 1
    assert "squeue" in err
    assert not list(tmp_path.glob("runs/*/plan.json"))


def test_local_sweep_cannot_be_detached(typed, tmp_path) -> None:
    code, out, err = typed("-m", *SMALL, "hardware=cpu", "seed=0,1", "launcher.detach=true")
    assert (code, out) == (2, "")
    assert "end with the supervising process" in err
    assert "-> hydra/launcher=slurm" in err
    assert not (tmp_path / "runs").exists()


def test_single_run_cannot_be_detached(typed) -> None:
    code, out, err = typed(*SMALL, "hardware=cpu", "launcher.detach=true")
    assert (code, out) == (2, "")
    assert "is for the runs of a sweep" in err


CLUSTER = (
    "resources.time=2:00:00",
    "slurm.partition=x",
    "slurm=apptainer",
    "+slurm.options.nice=5",
)
HERE = ("launcher.cpu_slots=2", "launcher.runs_per_device=2")


@pytest.mark.parametrize("text", [*CLUSTER, *HERE])
def test_override_of_another_launcher_warns(text) -> None:
    typed = ["seed=1", text, "launcher.detach=true"]
    found = {
        "local": unused_cluster_overrides(typed),
        "slurm": find_launcher("slurm").unused(typed),
    }
    (said,) = found.pop("local" if text in CLUSTER else "slurm")
    assert said.startswith(f"{text} ")
    assert list(found.values()) == [[]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param([*SMALL, "hardware=cpu", "slurm.qos=x"], "slurm.qos=x has no", id="a run"),
        pytest.param(
            ["-m", *SMALL, "hardware=cpu", "seed=0,1", "resources.cpus=2"],
            "resources.cpus=2 has no effect with hydra/launcher=local",
            id="a sweep",
        ),
        pytest.param(
            [*SLURM, "hardware=cpu", "launcher.cpu_slots=2"],
            "launcher.cpu_slots=2 has no effect with hydra/launcher=slurm",
            id="in a cluster",
        ),
    ],
)
def test_cluster_warnings_are_printed(arguments, said, typed) -> None:
    code, out, err = typed(*arguments, "plan_only=true")
    assert code == 0, err
    assert f"warning: {said}" in out


# --- after the submission -------------------------------------------------------------------------


@pytest.fixture
def submitted(monkeypatch, tmp_path):
    """A sweep of two runs, with a cluster that takes so many of them."""

    class Taken:
        room, refused = 2, 0

        def __init__(self, books, paths, identity) -> None:
            self.jobs = list(books.jobs)

        def submit(self) -> None:
            """As many as fit."""
            for job in self.jobs[self.room :]:
                job.waiting_for = str(SubmissionRefused("sbatch: error: QOSMaxSubmitJobLimit"))
            for job in self.jobs[: self.refused]:
                job.end(Outcome.crashed, "sbatch: error: Invalid partition")

        def wait(self) -> None:
            """Until somebody leaves."""
            raise KeyboardInterrupt

        def goes_on(self) -> bool:
            """All do."""
            return True

        def not_started(self):
            """Those that did not fit."""
            return self.jobs[self.room :]

    monkeypatch.setattr("eke.launch.slurm.dispatch.Cluster", Taken)
    return Taken


@pytest.mark.parametrize(
    ("room", "detach", "code"),
    [(2, True, 0), (2, False, 75), (1, True, 75)],
    ids=["detached", "ctrl-c", "detached, full"],
)
def test_detached_command_states_which_runs_continue(
    room, detach, code, submitted, typed, no_gpu
) -> None:
    submitted.room = room
    more = ["launcher.detach=true"] if detach else []
    found, out, err = typed(*SLURM, "hardware=cpu", *more)
    assert found == code, err
    assert {"eke status", "eke cancel"} <= {
        line.partition(": ")[2][:10] for line in out.splitlines()
    }
    left = "not submitted: 1 run (sbatch: error"
    assert (left in out) is (room == 1)


def test_detaching_with_rejected_runs_is_a_failure(submitted, typed, no_gpu) -> None:
    submitted.refused = 1
    assert typed(*SLURM, "hardware=cpu", "launcher.detach=true")[0] == 1


@pytest.mark.parametrize("multirun", [[], ["-m"]], ids=["one run", "a sweep"])
def test_hydra_sweeper_submits_no_jobs(multirun, capsys) -> None:
    """Its runs would start here, on a login node."""
    code = workflows.main(
        [*multirun, "hydra/launcher=slurm", "hydra/sweeper=basic", "seed=1", "hardware=cpu"]
    )
    assert code == 2
    error = capsys.readouterr().err
    assert "hydra/launcher = slurm" in error
    assert "not hydra/sweeper=basic" in error
