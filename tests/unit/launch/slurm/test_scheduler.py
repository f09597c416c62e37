"""SLURM's commands: what they are asked, how often, and that no answer is no verdict."""

import os

import pytest

from eke.common.errors import EkeError
from eke.launch.slurm import scheduler
from eke.launch.slurm.scheduler import Element

QUEUE = """\
123|0|RUNNING|n1|eke-a|None
123|1|PENDING||eke-a|Resources
123|2|COMPLETING|n2|eke-a|None
7|N/A|PENDING||by hand|Priority
"""


def test_queue_is_read_by_array_element(stubs) -> None:
    stubs.say("squeue", QUEUE)
    queue = scheduler.queue()
    assert queue["eke-a_0"] == Element("RUNNING", "n1", "eke-a", "None", ("123_0",))
    assert queue["eke-a_1"].reason == "Resources"
    assert set(queue) == {"eke-a_0", "eke-a_1", "eke-a_2", "by hand_N/A"}
    (asked,) = stubs.calls()
    assert f"--user={os.getuid()}" in asked


@pytest.mark.parametrize(
    ("states", "state", "ids"),
    [
        (("PENDING", "RUNNING"), "RUNNING", ("10_0", "9_0")),
        (("RUNNING", "PENDING"), "RUNNING", ("9_0", "10_0")),
        (("PENDING", "PENDING"), "PENDING", ("9_0", "10_0")),
        (("CANCELLED", "PENDING"), "PENDING", ("10_0",)),
    ],
)
def test_two_arrays_of_one_name_are_one_submission(states, state, ids, stubs) -> None:
    lines = [f"{number}|0|{s}|n1|eke-a|None" for number, s in zip((9, 10), states, strict=True)]
    stubs.say("squeue", "\n".join(reversed(lines)))
    found = scheduler.queue()["eke-a_0"]
    assert (found.state, found.ids) == (state, ids)


def test_unexpected_lines_are_ignored(stubs) -> None:
    odd = ("5|1|RUNNING", "5|1|RUNNING|n1|a|b|c", "")
    stubs.say("squeue", "\n".join((*odd, "123|0|RUNNING|n1|a|None")))
    assert scheduler.queue()["a_0"].state == "RUNNING"


def test_missing_program_is_reported(stubs) -> None:
    (stubs.folder / "squeue").unlink()
    os.environ["PATH"] = str(stubs.folder)
    with pytest.raises(EkeError, match=r"squeue: .*hydra/launcher=slurm"):
        scheduler.queue()


def test_program_that_cannot_start_is_reported(stubs) -> None:
    os.environ["PATH"] = str(stubs.folder)
    (stubs.folder / "squeue").write_bytes(b"\x00\x01")
    with pytest.raises(EkeError, match=r"^squeue "):
        scheduler.queue()


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"err": "slurm_load_jobs error: Unable to contact slurm controller", "code": 1}, "Unable"),
        ({"out": "said here", "code": 2}, "said here"),
        ({"code": 3}, "exit code 3"),
        ({"run": "kill -9 $$"}, "exit code -9"),
    ],
    ids=["stderr", "stdout", "nothing", "killed"],
)
def test_failing_program_is_reported(said, match, stubs) -> None:
    stubs.say("squeue", **said)
    with pytest.raises(EkeError, match=match):
        scheduler.queue()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        pytest.param(
            "squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
            "squeue: error: fetch_config: DNS SRV lookup failed\n"
            "squeue: fatal: Could not establish a configuration source",
            "fatal: Could not establish a configuration source",
            id="no cluster",
        ),
        pytest.param(
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
            id="no controller",
        ),
    ],
)
def test_missing_controller_is_reported_with_a_fix(said, reason, stubs) -> None:
    stubs.say("squeue", err=said, code=1)
    with pytest.raises(EkeError) as error:
        scheduler.queue()
    assert str(error.value) == (
        f"squeue cannot reach a SLURM controller ({reason}). Submit from a login node, or run "
        "here without hydra/launcher=slurm"
    )


def test_hung_program_is_reported(stubs, monkeypatch) -> None:
    monkeypatch.setattr(scheduler, "PATIENCE_S", 0.05)
    stubs.write("squeue", "#!/bin/sh\nexec sleep 30\n")
    with pytest.raises(EkeError, match=r"^squeue .* 0\.05 s"):
        scheduler.queue()


# --- last states ----------------------------------------------------------------------------------


def test_accounting_is_queried_once_for_all(stubs) -> None:
    ends = ("5_0|eke-x|COMPLETED", "5_1|eke-x|CANCELLED by 0", "6_0|a|FAILED")
    stubs.say("squeue", "")
    stubs.say("sacct", "\n".join(ends))
    states = scheduler.last_states(["eke-x_0", "eke-x_1", "eke-y_0"])
    assert states == {"eke-x_0": "COMPLETED", "eke-x_1": "CANCELLED by 0"}
    for command in ("squeue", "sacct"):
        (call,) = stubs.calls(command)
        assert "--name=eke-x,eke-y" in call
        assert "--jobs" not in call, "a number may be another job's by now"


@pytest.mark.parametrize(
    "late", ["", "5|eke-x|FAILED\n", "5_0|eke-x|RUNNING\n", "5_[0-3]|eke-x|PENDING\n"]
)
def test_controller_state_overrides_delayed_accounting(late, stubs) -> None:
    stubs.say("sacct", late, code=not late)
    stubs.say("squeue", "5|0|PREEMPTED|n1|eke-x|None\n5|1|FAILED|n1|eke-x|None\n")
    assert scheduler.last_states(["eke-x_0"]) == {"eke-x_0": "PREEMPTED"}


def test_arrays_of_one_name_have_separate_states(stubs) -> None:
    stubs.say("sacct", "5_0|eke-x|FAILED\n6_1|eke-x|TIMEOUT\n")
    stubs.say("squeue", "5|0|FAILED|n1|eke-x|None\n6|0|PENDING||eke-x|None\n")
    assert scheduler.last_states(["eke-x_0", "eke-x_1"]) == {
        "eke-x_0": "PENDING", "eke-x_1": "TIMEOUT"
    }  # fmt: skip


def test_unknown_job_has_no_state(stubs) -> None:
    """What accounting takes for running, and neither the queue nor the controller knows."""
    stubs.say("sacct", "5_0|eke-x|RUNNING\n")
    stubs.say("squeue", code=1)
    stubs.say("scontrol", err="Invalid job id specified", code=1)
    assert scheduler.last_states(["eke-x_0", "eke-y_0"]) == {}
    assert scheduler.show_job("5_0") == {}


def test_empty_query_starts_no_program(stubs) -> None:
    assert scheduler.last_states([]) == {}
    assert scheduler.jobs_of_names([]) == {}
    scheduler.cancel([])
    assert stubs.calls() == []


def test_job_details_are_read(stubs) -> None:
    stubs.say("scontrol", "JobId=6 ArrayJobId=5 JobState=COMPLETING Reason=None Command=/x z=1\n")
    assert scheduler.show_job("5_1")["JobState"] == "COMPLETING"
    assert stubs.calls() == ["scontrol show job --oneliner 5_1"]


# --- names ----------------------------------------------------------------------------------------


def test_jobs_are_found_by_name(stubs) -> None:
    """The queue, what has just ended, and what only accounting remembers."""
    stubs.say("squeue", QUEUE + "8|0|COMPLETED|n1|eke-d|None\n")
    stubs.say("sacct", "9_0|eke-b|RUNNING\n9_1|eke-b|PENDING\n")
    found = scheduler.jobs_of_names(["eke-a", "eke-b", "eke-c", "eke-d"])
    assert found == {"eke-a": "123", "eke-b": "9", "eke-d": "8"}
    assert "--states=all" in stubs.calls("squeue")[0]
    stubs.say("sacct", err="accounting storage is disabled", code=1)
    assert scheduler.jobs_of_names(["eke-b", "eke-d"]) == {"eke-d": "8"}


def test_names_without_a_queue(stubs) -> None:
    stubs.say("squeue", err="no controller", code=1)
    with pytest.raises(EkeError, match="no controller"):
        scheduler.jobs_of_names(["eke-a"])


@pytest.mark.parametrize(
    ("said", "size"),
    [
        ({"out": "MaxJobCount = 9\nMaxArraySize            = 1001\n"}, 1001),
        ({"out": "MaxArraySize = 9\nSchedulerParameters = bf_max,max_array_tasks=4\n"}, 4),
        ({"out": "MaxArraySize=0\n"}, 1),
        ({"out": "nothing of that kind\n"}, scheduler.DEFAULT_ARRAY_SIZE),
        ({"code": 1}, scheduler.DEFAULT_ARRAY_SIZE),
    ],
    ids=["given", "tasks", "none", "absent", "no answer"],
)
def test_maximum_array_size_is_read(said, size, stubs) -> None:
    stubs.say("scontrol", **said)
    assert scheduler.max_array_size() == size


def test_jobs_are_cancelled_in_one_call(stubs) -> None:
    stubs.say("scancel")
    jobs = [Element("RUNNING", "n1", "eke-a", "", (f"5_{n}", f"6_{n}")) for n in range(100)]
    scheduler.cancel(jobs)
    (call,) = stubs.calls()
    assert call.startswith("scancel 5_0 6_0 5_1 ")
    stubs.say("scancel", err="scancel: error: down", code=1)
    with pytest.raises(EkeError, match="down"):
        scheduler.cancel(jobs[:1])


GONE = [
    *("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_CPUS_PER_TASK", "SLURM_CONFIG"),
    *("SUBMITIT_EXECUTOR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"),
    *("MASTER_PORT", "PMI_RANK", "PMIX_RANK", "TORCHELASTIC_RUN_ID", "SQUEUE_STATES"),
    *("SQUEUE_PARTITION", "SACCT_FORMAT", "SBATCH_JOB_NAME", "SBATCH_ARRAY_INX", "SBATCH_OUTPUT"),
    *("SBATCH_TIMELIMIT", "SBATCH_WAIT", "SBATCH_EXPORT", "ACCELERATE_USE_CPU", "SRUN_EXPORT_ENV"),
    "SLURMD_DEBUG",
]
KEPT = [
    *("SLURM_CONF", "SLURM_JWT", "PATH", "HOME", "RANKING", "MY_RANK", "WORLD_SIZES"),
    *("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION", "SBATCH_WCKEY"),
    *("SBATCH_CONSTRAINT", "SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"),
    *("WANDB_API_KEY", "CUDA_VISIBLE_DEVICES"),
]
SBATCH = [
    "ACCOUNT", "ACCTG_FREQ", "ARRAY_INX", "BATCH", "CLUSTERS", "CONSTRAINT", "CONTAINER",
    "CORE_SPEC", "CPUS_PER_GPU", "DEBUG", "DELAY_BOOT", "DISTRIBUTION", "ERROR", "EXCLUSIVE",
    "EXPORT", "GET_USER_ENV", "GPU_BIND", "GPU_FREQ", "GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK",
    "GRES", "GRES_FLAGS", "HINT", "IGNORE_PBS", "INPUT", "JOB_NAME", "MEM_BIND", "MEM_PER_CPU",
    "MEM_PER_GPU", "MEM_PER_NODE", "NETWORK", "NO_KILL", "NO_REQUEUE", "OPEN_MODE", "OUTPUT",
    "OVERCOMMIT", "PARTITION", "POWER", "PROFILE", "QOS", "REQ_SWITCH", "REQUEUE",
    "RESERVATION", "SIGNAL", "SPREAD_JOB", "THREAD_SPEC", "THREADS_PER_CORE", "TIMELIMIT",
    "USE_MIN_NODES", "WAIT", "WAIT_ALL_NODES", "WCKEY",
]  # fmt: skip
"""Its input environment variables, without SBATCH_ (manual of sbatch, 22.05)."""


def test_sbatch_variables_that_override_a_request_are_removed() -> None:
    clean = scheduler.clean_environment({f"SBATCH_{name}": "1" for name in SBATCH})
    assert set(clean) == {name for name in KEPT if name.startswith("SBATCH_")}


def test_variables_of_a_surrounding_job_are_removed() -> None:
    clean = scheduler.clean_environment({name: "1" for name in (*GONE, *KEPT)})
    assert sorted(clean) == sorted(KEPT)


def test_commands_run_in_the_clean_environment(stubs, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_CONF", "/here")
    stubs.say("squeue", run='echo "0|0|$SLURM_JOB_ID|$SLURM_CONF||"')
    assert scheduler.queue()["_0"] == Element("", "/here", "", "", ("0_0",))


def test_sbatch_test_only_reports_a_rejection(stubs) -> None:
    """Nothing is submitted, and its words are the answer."""
    text = "#!/bin/bash\n#SBATCH --partition=nosuch\n"
    stubs.say("sbatch", err="sbatch: error: invalid partition specified: nosuch", code=1)
    assert "invalid partition specified: nosuch" in scheduler.validate_script(text)
    stubs.say("sbatch", err="sbatch: Job 3 to start at 2026-11-25T15:41:19")
    assert scheduler.validate_script(text) == ""
    assert all(" --test-only --partition=nosuch " in call for call in stubs.calls("sbatch"))
