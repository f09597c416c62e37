"""Memory that really runs out, disks that really take no more: a clear end, and nothing lost.

The limits are the system's own, of address space and of file sizes; they hold for the command and
for the worker it starts. A file at its limit differs from a full disk in nothing but the text.
"""

import json
import resource
import shutil
import sys
from pathlib import Path

import pytest
from live import SHORT, record_of, run_folders, run_in
from support import REPO, Finished, last_wins

from eke.plan.record import metrics

pytestmark = pytest.mark.slow

GIB = 2**30

# One feed-forward activation is 256 x 2048 x 4096 x 4 bytes = 8 GiB, while all that comes before it
# fits into a few hundred MiB; the evaluation before training has one sample.
TOO_LARGE = last_wins(
    *SHORT,
    "model.intermediate_size=4096",
    "data.seq_len=2048",
    "data.num_samples=256",
    "data.num_eval_samples=1",
    "batch.per_device=256",
    "batch.eval_per_device=1",
    "ignore_forecast=true",
)

# Half a kilobyte of metrics a step; 41 kB of weights and twice that of optimizer state.
SMALL = last_wins(
    *SHORT,
    "model.hidden_size=16",
    "model.intermediate_size=32",
    "model.dropout=0.1",
    "train.steps=330",
    "train.log_every=5",
    "train.checkpoint_every=50",
    "train.save_final=false",
    "hardware=cpu",
)

LIMITED = """
import os, resource, sys
kind, limit = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(kind, (limit, limit))
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # Python 3.11 leaves its own files torn, for all
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""


def train_within(kind: int, limit: int, tmp: Path, *arguments: str) -> Finished:
    """`python train.py ...` under a limit of the operating system, in bytes."""
    command = [sys.executable, "-c", LIMITED, str(kind), str(limit), str(REPO / "train.py")]
    return run_in(tmp, [*command, *arguments])


def curve(folder: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of every step."""
    rows, unreadable = metrics.read_rows(folder / "metrics.jsonl")
    assert unreadable <= 1, "only the row that was being written may be torn"
    steps = metrics.latest(rows, metrics.LOSS)
    return [(r[metrics.STEP], r[metrics.LOSS], r["train/grad_norm"]) for r in steps]


def checkpoints(folder: Path) -> list[str]:
    """Names of everything in the folder of checkpoints."""
    place = folder / "checkpoints"
    return sorted(p.name for p in place.iterdir()) if place.exists() else []


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is enforced on Linux only")
def test_sweep_skips_larger_runs_after_oom(train_forked, tmp_path) -> None:
    """Real memory running out in a sweep: in one run of it, not two."""
    sizes = ("batch.per_device=256,512", "data.num_samples=512", "train.steps=2")
    sweep = last_wins(*TOO_LARGE, *sizes)
    done = train_within(resource.RLIMIT_AS, 6 * GIB, tmp_path, "-m", *sweep)
    assert done.code == 1, done.text
    (file,) = tmp_path.glob("runs/sweep-*/sweep.json")
    cells = json.loads(file.read_text())["cells"]
    assert [cell["outcome"] for cell in cells] == ["oom", "skipped"], done.text
    assert "batch.per_device=512 needs no less than 256" in cells[1]["reason"]
    folder = tmp_path / "runs" / cells[0]["run_id"]
    record = record_of(folder)
    assert (record["outcome"], record["exit_code"]) == ("oom", 1)
    assert record["failure"]["phase"] == "forward"
    assert "tried to allocate 8589934592 bytes" in record["failure"]["message"]
    assert "Traceback" in record["failure"]["traceback"], "the record tells where"
    assert "Traceback" not in done.text, "the terminal does not"
    assert "out of memory in forward" in " ".join(done.out.split())
    assert record["steps_done"] == 0
    memory = record["memory"]
    assert memory["measured"]["process_peak_bytes"] < 6 * GIB
    assert memory["predicted"]["expected"] > 6 * GIB, "it was foreseen, but for the limit"
    assert memory["advice"], "and what would need less is said"

    again = train_forked(*last_wins(*sweep, "batch.per_device=256"))
    assert again.code == 1
    assert "(recorded " in again.out, "out of memory is final"
    assert "rerun=true" in again.out
    assert memory["advice"][0] in " ".join(again.out.split())
    assert len((folder / "attempts.jsonl").read_text().splitlines()) == 1


def test_failed_write_keeps_earlier_rows(start, train_forked, tmp_path, train_ranks) -> None:
    live = start(*last_wins(*SMALL, "train.steps=100000"))
    live.wait_for_step(10)
    (folder,) = run_folders(tmp_path)
    # Out of sight first: a worker that writes on makes deleting a tree in place a race.
    folder.rename(tmp_path / "moved")
    out = live.finish()
    assert live.process.returncode == 1, out
    assert f"runs/{folder.name} cannot be written: No such file or directory" in out
    assert "Traceback (most recent call last)" not in out
    shutil.rmtree(tmp_path / "moved")
    shutil.rmtree(folder, ignore_errors=True)

    folder = a_checkpoint_that_cannot_be_written(tmp_path)
    first = curve(folder)
    metrics_that_cannot_be_written(tmp_path, folder)
    second = curve(folder)
    assert train_forked(*SMALL).code == 0
    assert record_of(folder)["outcome"] == "ok"
    assert record_of(folder)["attempt"] == 2
    found = curve(folder)
    assert len(found) == 330
    assert found[: len(first)] == first
    assert found[: len(second)] == second, "an earlier row was harmed"
    shutil.move(folder, tmp_path / "disturbed")
    assert found == curve(train_ranks(*SMALL))


def a_checkpoint_that_cannot_be_written(tmp: Path) -> Path:
    done = train_within(resource.RLIMIT_FSIZE, 60_000, tmp, *SMALL)
    assert done.code == 1, done.text
    assert "Traceback" not in done.text
    assert "File too large. Files are limited to" in " ".join(done.out.split())
    (folder,) = run_folders(tmp)
    record = record_of(folder)
    assert (record["outcome"], record["failure"]["phase"]) == ("crashed", "checkpoint")
    assert record["steps_done"] == len(curve(folder)) == 50
    assert checkpoints(folder) == [], "half a checkpoint was left"
    return folder


def metrics_that_cannot_be_written(tmp: Path, folder: Path) -> None:
    done = train_within(resource.RLIMIT_FSIZE, 120_000, tmp, *SMALL)
    assert done.code == 1, done.text
    assert "Traceback" not in done.text
    assert "File too large. Files are limited to" in " ".join(done.out.split())
    record = record_of(folder)
    assert record["outcome"] == "crashed"
    assert "metrics.jsonl" in record["failure"]["message"]
    written = len(curve(folder))
    assert 150 < written < 330
    newest = written // 50 * 50
    assert checkpoints(folder) == [f"step-{newest - 50:08d}", f"step-{newest:08d}"]


def test_unwritable_record_is_reported(train_forked, tmp_path) -> None:
    few = last_wins(*SMALL, "train.steps=3")
    # More than plan.json and three rows of metrics need, less than the record.
    done = train_within(resource.RLIMIT_FSIZE, 10_000, tmp_path, *few)
    (folder,) = run_folders(tmp_path)
    assert len(curve(folder)) == 3, "the limit was meant for the record"
    assert done.code == 1
    assert "Traceback" not in done.text
    assert f"runs/{folder.name} cannot be written: File too large" in " ".join(done.err.split())
    assert not (folder / "record.json").exists()
    assert train_forked(*few).code == 0
    assert record_of(folder)["outcome"] == "ok"
    assert (folder / "record.json").stat().st_size > 10_000


def test_unwritable_plan_is_reported(tmp_path) -> None:
    done = train_within(resource.RLIMIT_FSIZE, 1_000, tmp_path, *SMALL)
    assert done.code == 1
    assert "Traceback" not in done.text
    assert "cannot be written: File too large" in " ".join(done.err.split())
    (folder,) = run_folders(tmp_path)
    assert not (folder / "attempts.jsonl").exists(), "no worker was started"
