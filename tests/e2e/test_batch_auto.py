"""`batch=auto` for real: probes that fit, run out of memory and are interrupted.

The machine's memory is declared smaller than it is, so that the forecast is tight; what a
process may really have is limited by the system, and runs out there.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import record_of, run_folders, run_in
from support import PATIENCE_S, TINY, Finished, environment, last_wins

pytestmark = pytest.mark.slow

MIB = 2**20

HOST = 1024 * MIB
"""What batch=auto leaves to Python and the system."""

WORK = last_wins(
    *TINY,
    "batch=auto",
    "batch.target=62",
    "batch.eval_per_device=1",
    "model.hidden_size=64",
    "model.num_hidden_layers=4",
    "model.intermediate_size=2048",
    "data=synthetic",
    "data.seq_len=128",
    "data.num_samples=124",
    "data.num_eval_samples=1",
    "train.steps=2",
    "train.save_final=false",
)
"""Possible micro-batches are 1, 2, 31 and 62; traces: 67, 624 and 1220 MiB of the last three."""

TIGHT = HOST + 630 * MIB
"""Between what is expected of 31 and its high end, 636 MiB."""

FAKED = """
import sys
import eke.hardware.cpu as cpu
memory, limit = int(sys.argv[1]), int(sys.argv[2])
cpu.memory_limit = lambda *_: memory
if limit:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from eke.workflows import main
sys.exit(main(sys.argv[3:]))
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> Path:
    """What these tests have traced: each goes on from there."""
    return tmp_path_factory.mktemp("traced")


@pytest.fixture(autouse=True)
def _shared_traces(traced: Path, tmp_path: Path) -> Iterator[None]:
    own = tmp_path / "cache" / "eke" / "traces"
    shutil.copytree(traced, own)
    yield
    shutil.copytree(own, traced, dirs_exist_ok=True)


def surroundings(tmp: Path) -> dict[str, str]:
    """A cache and a folder for temporary files of its own."""
    (tmp / "tmp").mkdir(exist_ok=True)
    return {"XDG_CACHE_HOME": str(tmp / "cache"), "TMPDIR": str(tmp / "tmp")}


def command(memory: int, limit: int, *arguments: str) -> list[str]:
    return [sys.executable, "-c", FAKED, str(memory), str(limit), *arguments]


def train(tmp: Path, memory: int, limit: int, *arguments: str) -> Finished:
    """`python train.py ...` on a machine of so much memory, really limited to so much."""
    done = run_in(tmp, command(memory, limit, *arguments), 2 * PATIENCE_S, **surroundings(tmp))
    assert not list((tmp / "tmp").glob("eke-probe-*")), "a probe's folder was left"
    return done


def batch_of(tmp: Path) -> dict[str, int]:
    """The batch of the only run."""
    (folder,) = run_folders(tmp)
    found: dict[str, int] = record_of(folder)["plan"]["batch"]
    return found


def interrupt_a_probe(tmp_path: Path) -> None:
    """By Ctrl-C; it leaves nothing."""
    live = subprocess.Popen(
        command(TIGHT, 0, *WORK),
        cwd=tmp_path,
        env={**environment(tmp_path), **surroundings(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while not (started := list((tmp_path / "tmp").glob("eke-probe-*/run/attempts.jsonl"))):
        assert live.poll() is None, live.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    found = re.search(r'"pid": ?(\d+)', started[0].read_text())
    assert found is not None
    os.kill(live.pid, signal.SIGINT)
    out, _ = live.communicate(timeout=PATIENCE_S)
    assert live.returncode == 75, out
    assert "Stopping the probe" in out
    assert "Traceback" not in out
    with pytest.raises(ProcessLookupError):
        os.kill(int(found[1]), 0)
    assert not list((tmp_path / "tmp").glob("eke-probe-*"))
    assert not (tmp_path / "runs").exists(), "no run was started"
    assert not list((tmp_path / "cache").glob("eke/batches/*")), "and nothing was learnt"


def test_interrupted_probe_is_repeated_and_its_result_reused(tmp_path) -> None:
    interrupt_a_probe(tmp_path)
    done = train(tmp_path, TIGHT, 0, *WORK)
    assert done.code == 0, done.text
    assert "probing batch.per_device=31" in done.err
    assert "batch.per_device=31 fits" in done.err
    assert "probed" in done.err
    batch = batch_of(tmp_path)
    assert (batch["per_device"], batch["accumulation"]) == (31, 2)
    (folder,) = run_folders(tmp_path)
    record = record_of(folder)
    assert record["outcome"] == "ok"
    assert record["plan"]["probe"] is False
    again = train(tmp_path, TIGHT, 0, *WORK)
    assert "probing" not in again.text
    assert "(recorded " in again.out
    typed = [text for text in WORK if not text.startswith(("batch=", "batch.target="))]
    same = train(tmp_path, TIGHT, 0, *typed, "batch.per_device=31", "batch.accumulation=2")
    assert "(recorded " in same.out, "typed, it is the same run"


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is enforced on Linux only")
def test_oom_probe_lowers_the_batch(tmp_path) -> None:
    # Python, torch and its profiler take about 1.3 GB of addresses; 31 samples do not fit beside.
    done = train(tmp_path, TIGHT, 1500 * MIB, *WORK)
    assert done.code == 0, done.text
    assert "batch.per_device=31 does not fit: out of memory in" in done.err
    assert batch_of(tmp_path)["per_device"] == 2
    assert "31 ran out of memory in a probe" in " ".join(done.err.split())


def test_two_processes_are_probed_together(tmp_path) -> None:
    two = ("distributed=ddp", "distributed.num_processes=2", "batch.target=124")
    typed = last_wins(*WORK, *two)
    # Each process has half of the machine; DDP's buckets come on top of one process's forecast.
    done = train(tmp_path, 2 * (TIGHT + 10 * MIB), 0, *typed)
    assert done.code == 0, done.text
    assert "batch.per_device=31 fits" in done.err, done.text
    batch = batch_of(tmp_path)
    assert (batch["per_device"], batch["accumulation"], batch["world_size"]) == (31, 2, 2)
