"""What sbatch says: a job, a refusal, a full queue, or nothing that anybody could rely on."""

import pytest

from eke.common.errors import EkeError
from eke.launch.slurm import scheduler
from eke.launch.slurm.scheduler import SubmissionRefused


@pytest.fixture
def script(tmp_path):
    """A batch script; its options are arguments too, which no variable of the shell replaces."""
    file = tmp_path / "x y.sbatch"
    lines = [
        "#!/bin/bash",
        "#SBATCH --partition='long jobs'",
        "#SBATCH --time=60",
        "#SBATCH --requeue",
    ]
    file.write_text("\n".join([*lines, "srun echo '#SBATCH --qos=no'"]))
    return file


@pytest.mark.parametrize("said", ["12\n", "12;cluster\n", "a note of the site's\n12\n"])
def test_job_id_is_read(said, stubs, script) -> None:
    stubs.say("sbatch", said)
    assert scheduler.submit(script) == "12"
    options = "--partition=long jobs --time=60 --requeue"
    assert stubs.calls() == [f"sbatch --parsable {options} {script}"]


@pytest.mark.parametrize("said", ["", "Submitted\n"])
def test_unintelligible_answer_is_not_a_rejection(said, stubs, script) -> None:
    stubs.say("sbatch", said)
    with pytest.raises(EkeError, match="is not a job id") as caught:
        scheduler.submit(script)
    assert not isinstance(caught.value, SubmissionRefused)


POLICY = "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, "
POLICY += "user's size and/or time limits)"
FULL = {
    "sbatch: error: Batch job submission failed: Invalid partition name specified": False,
    f"sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: {POLICY}": True,
    f"sbatch: error: AssocGrpSubmitJobsLimit\nsbatch: error: {POLICY}": True,
    f"sbatch: error: QOSMaxWallDurationPerJobLimit\nsbatch: error: {POLICY}": False,
    f"sbatch: error: AssocMaxGRESPerJob\nsbatch: error: {POLICY}": False,
    f"sbatch: error: {POLICY}": True,
    "sbatch: error: Slurm temporarily unable to accept job": True,
    "sbatch: error: Invalid qos specification": False,
}


@pytest.mark.parametrize("said", FULL, ids=lambda text: text.split("\n")[0][15:])
def test_rejection_is_read(said, stubs, script) -> None:
    stubs.say("sbatch", err=said, code=1)
    with pytest.raises(SubmissionRefused) as caught:
        scheduler.submit(script)
    assert caught.value.is_full is FULL[said]


@pytest.mark.parametrize(
    "said",
    [
        {"err": "sbatch: error: Socket timed out on send/recv operation"},
        {"err": "sbatch: error: Zero Bytes were transmitted or received"},
        {"run": "kill -9 $$"},
        {"run": "exec sleep 30"},
    ],
    ids=["timeout", "zero", "killed", "slow"],
)
def test_lost_answer_is_not_a_rejection(said, stubs, script, monkeypatch) -> None:
    monkeypatch.setattr(scheduler, "PATIENCE_S", 0.1 if "exec" in said.get("run", "") else 60)
    stubs.say("sbatch", code=1, **said)
    with pytest.raises(EkeError) as caught:
        scheduler.submit(script)
    assert not isinstance(caught.value, SubmissionRefused)
