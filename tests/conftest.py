"""What all tests share: plans for small models, and trainings in this process or in a fresh one."""

import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from equivalence_compare import Curve
from hypothesis import settings
from live import Live
from random_tally import of_reports
from rank_server import RankServer
from support import PATIENCE_S, REPO, TINY, Finished, environment, last_wins

from eke.common import screen
from eke.common.python_runtime import relax_gc
from eke.common.text import GIB
from eke.plan.planner import Plan

# The same examples in every run, so that CI is red for a reason and not by chance; no time limits.
settings.register_profile("eke", deadline=None, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "eke"))

# Until all tests are collected nearly every new object stays.
gc.disable()

# One thread: these models are too small for two, and tests run beside each other.
os.environ["OMP_NUM_THREADS"] = "1"

# huggingface_hub reads it once, when it is imported: later it would look for a server, and wait.
os.environ["HF_HUB_OFFLINE"] = "1"

# Inductor compiles a probe of the processor in each new cache, and loads it in each process.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"

# With more, each process that compiles starts another one, which imports torch for seconds.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

# Hundreds of processes are started: each would compile eke, and pytest rewrite the tests, anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A suite started in the background (`pytest &`) ignores Ctrl-C, and what it starts inherits that:
# the tests that interrupt a process would wait for its end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def unwrapped_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print errors without line breaks, except in tests of the width, which set COLUMNS."""
    monkeypatch.setattr(
        "eke.common.errors.width", lambda stream: int(os.environ.get("COLUMNS", 10_000))
    )


@pytest.fixture(autouse=True)
def default_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each test without `-q`, `-v` and `--color`: a command keeps them in its process."""
    monkeypatch.setattr(screen, "_verbosity", [0])
    monkeypatch.setattr(screen, "_chosen", {"color": "auto"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put SLURM's tests first: they take turns, so in one worker they keep no other one waiting."""
    items.sort(key=lambda item: item.path.parent.name != "slurm")


def pytest_collection_finish() -> None:
    """Let no collection of garbage look again at a million objects that stay to the end."""
    gc.collect()
    gc.freeze()
    gc.enable()
    relax_gc()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What random configurations came to, in all processes."""
    stats = terminalreporter.stats
    if tally := of_reports([*stats.get("passed", ()), *stats.get("failed", ())]):
        terminalreporter.section("random configurations")
        terminalreporter.write_line(tally.render())


@pytest.fixture(autouse=True)
def torchs_own_linear() -> Iterator[None]:
    """ZeRO-3 puts a function of its own there (deepspeed 0.19.8), which dynamo cannot follow."""
    yield
    if functional := sys.modules.get("torch.nn.functional"):  # "torch" itself may be a stand-in
        functional.linear = sys.modules["torch._C"]._nn.linear


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the developer's folders, or reaches a tracker's server."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("EKE_CALIBRATION", str(tmp_path / "calibration"))
    monkeypatch.setenv("EKE_LEASES", str(tmp_path / "leases"))


@pytest.fixture
def own_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """A CPU with as many bytes of memory as a test says, 8 GiB at first, and a cache of its own."""
    from eke.hardware import Device, detect

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def has(memory: int) -> None:
        cpu = Device(kind="cpu", name="test cpu", memory_bytes=memory)
        monkeypatch.setattr(sys.modules[detect.__module__], "detect", lambda: cpu)

    has(8 * GIB)
    return has


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    """Overrides -> Plan, checked, for this machine's CPU."""
    from eke.config.compose import compose
    from eke.workflows.planning import plan_for

    def make(*overrides: str, planning: bool = False) -> Plan:
        return plan_for(compose([*overrides, "hardware=cpu"]), planning)

    return make


@pytest.fixture
def train_py(tmp_path: Path) -> Callable[..., Finished]:
    """`python train.py ...` in a folder of its own."""

    def run(*arguments: str, timeout: float = PATIENCE_S, extra: Sequence[str] = ()) -> Finished:
        done = subprocess.run(
            [sys.executable, str(REPO / "train.py"), *arguments],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def train_forked(tmp_path: Path) -> Callable[..., Finished]:
    """As train_py, but with forked workers, for tests of results: see forked_workers.py."""
    from forked_workers import run

    return lambda *arguments: run(tmp_path, "train", *arguments)


@pytest.fixture
def train_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Finished]]:
    """What `python train.py ...` calls, in this process: for what plans or rejects, and trains not.

    A process takes a second to start; tests/e2e/test_wrong_commands.py starts some.
    """
    from hydra.core.hydra_config import HydraConfig

    from eke import workflows

    monkeypatch.chdir(tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> Finished:
        code = workflows.main(list(arguments))
        said = capsys.readouterr()
        return Finished(code, said.out, said.err)

    yield run
    HydraConfig.instance().cfg = None  # what answers --cfg leaves it as in a job of Hydra's


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """One for this process; it starts with the first request."""
    server = RankServer(tmp_path_factory.mktemp("rank_server"))
    yield server
    server.close()


@pytest.fixture
def train_plan(rank_server: RankServer, tmp_path: Path) -> Callable[..., Path]:
    """Plan -> the folder of a run that processes of its own have trained, to the end expected.

    What `python train.py` does, but for its own process and the agent's: see rank_server.py.
    """
    from trained_ranks import train_in_ranks

    def run(plan: Plan, outcome: str = "ok") -> Path:
        folder, record, codes = train_in_ranks(
            rank_server, plan, tmp_path / "runs", environment(tmp_path)
        )
        logs = "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))
        assert record.outcome == outcome, logs[-4000:]
        assert outcome != "ok" or codes == [0] * plan.batch.world_size, logs[-4000:]
        return folder

    return run


@pytest.fixture
def train_ranks(
    make_plan: Callable[..., Plan], train_plan: Callable[..., Path]
) -> Callable[..., Path]:
    """Overrides -> the folder of a run that was trained so."""
    return lambda *overrides: train_plan(make_plan(*last_wins(*overrides)))


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Live]:
    """Start `python train.py ...` and go on; many runs: with forked workers."""
    return lambda *arguments, **options: Live(tmp_path, arguments, **options)


@pytest.fixture
def tiny() -> tuple[str, ...]:
    """Overrides that make any model small."""
    return TINY


@pytest.fixture
def curve_of(make_plan, tmp_path: Path) -> Callable[..., Curve]:
    """Overrides -> what the run logs at each step."""
    from trained import train_job

    from eke.plan.record import metrics

    def run(*overrides: str) -> Curve:
        plan = make_plan(*last_wins(*overrides))
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}-{plan.run_id}"
        job = train_job(plan, folder)
        rows, unreadable = metrics.read_rows(job.paths.metrics)
        assert unreadable == 0
        steps = metrics.latest(rows, metrics.LOSS)
        assert len(steps) == plan.steps.total
        return [(row[metrics.LOSS], row["train/grad_norm"]) for row in steps]

    return run


@pytest.fixture(scope="session")
def known_curves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the runs that `baseline_of` has trained, the same for all workers of xdist."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    (shared / "curves").mkdir(exist_ok=True)
    return shared / "curves"


@pytest.fixture
def baseline_of(curve_of, known_curves) -> Callable[..., Curve]:
    """As curve_of, but trained once for all tests; not for source that a test has changed."""

    def run(*overrides: str) -> Curve:
        key = " ".join(sorted(last_wins(*overrides)))
        file = known_curves / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
        if not file.exists():
            own = file.with_suffix(f".{os.getpid()}")
            own.write_text(json.dumps(curve_of(*overrides)))
            own.replace(file)  # whole: another worker may read it now
        return [tuple(step) for step in json.loads(file.read_text())]

    return run
