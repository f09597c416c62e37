"""`batch=auto` as it is typed: what the plan says, what is refused, and when a run is tried out."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support import started_by_torchrun
from unit.plan.cases import plan_of

from eke import workflows
from eke.cli import main as cli
from eke.common.screen import take_flags
from eke.common.text import GIB, MIB
from eke.config.compose import compose
from eke.estimate.memory import room_for_a_batch
from eke.hardware import Device
from eke.launch.processes.run_attempt import Probed
from eke.workflows import running
from eke.workflows.auto_batch import memory_asked_for
from eke.workflows.planning import plan_for

pytestmark = pytest.mark.usefixtures("own_machine")

WORK = ("data=synthetic", "data.seq_len=32", "data.num_samples=64", "train.steps=20",
        "tracker=none")  # fmt: skip
AUTO = (*WORK, "batch=auto", "batch.target=64")


@pytest.fixture(autouse=True)
def wide(monkeypatch) -> Iterator[None]:
    """Rows of a table on one line, and every flag as before."""
    monkeypatch.setenv("COLUMNS", "400")
    yield
    take_flags([])


@pytest.fixture
def plan(capsys):
    """`eke plan --quick -v`: exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli(["plan", "--quick", "-v", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def identity(out: str) -> str:
    return row(out, "plan").split()[1]


def row(out: str, key: str) -> str:
    return next(line for line in out.splitlines() if line.split()[:1] == [key])


def test_plan_gives_the_auto_batch_and_its_reason(plan) -> None:
    code, out, _ = plan(*AUTO)
    assert code == 0
    said = row(out, "batch.per_device")
    assert said.split()[1] == "64"
    assert "batch.target=64" in said
    assert row(out, "batch.accumulation").split()[1] == "1"


def test_auto_batch_is_the_same_run_as_explicit_values(plan, own_machine) -> None:
    own_machine(GIB + 20 * MIB)
    _, out, _ = plan(*AUTO)
    size, times = (row(out, f"batch.{key}").split()[1] for key in ("per_device", "accumulation"))
    assert 1 < int(size) < 64
    assert int(size) * int(times) == 64
    assert f"{2 * int(size)} would need" in row(out, "batch.per_device")
    same = ([f"batch.per_device={size}", f"batch.accumulation={times}"],
            ["batch.per_device=null", "batch.target=64"])  # fmt: skip
    for typed in same:
        assert identity(plan(*WORK, *typed)[1]) == identity(out)


def test_auto_batch_without_target_keeps_default_samples(plan) -> None:
    _, out, _ = plan(*WORK, "batch=auto")
    assert row(out, "batch.target").split()[1] == "8"
    _, default, _ = plan(*WORK)
    assert identity(out) == identity(default)


def test_few_samples_reduce_the_default_step(plan) -> None:
    few = [text.replace("num_samples=64", "num_samples=7") for text in WORK]
    code, out, _ = plan(*few)
    assert code == 0
    assert "batch.per_device=7: " in out
    _, typed, _ = plan(*few, "batch.per_device=7")
    assert identity(out) == identity(typed)
    assert "warning: batch." not in typed
    assert "warning: batch." in plan("-m", *few, "seed=1,2")[1]
    composed = compose(few)
    composed.config.tracker.group = "of its sweep"
    assert plan_for(composed, planning=True).config.tracker.group == "of its sweep"
    for given in ("batch.per_device=8", "batch.accumulation=1", "batch.target=8", "batch=guide"):
        assert plan(*few, given, "data.num_samples=3")[0] == 2


TWO = ("distributed=ddp", "distributed.num_processes=2")


@pytest.mark.parametrize(
    ("typed", "said", "fix"),
    [
        pytest.param(
            ("batch.per_device=4",), "batch.per_device = 4", "batch=fixed", id="micro-batch"
        ),
        pytest.param(
            ("batch.accumulation=4",),
            "batch.accumulation = 4",
            "batch.accumulation=null batch.target=64",
            id="accumulation",
        ),
        pytest.param(
            ("batch.target=63", *TWO), "the 2 processes", "batch.target=64",
            id="target of two processes",
        ),
        pytest.param(
            ("batch.target=128",), "only 64", "batch.target=64", id="more than there is"
        ),
    ],
)  # fmt: skip
def test_conflict_with_batch_auto_is_rejected_with_a_fix(plan, typed, said, fix) -> None:
    keys = {text.split("=")[0] for text in typed}
    kept = [text for text in AUTO if text.split("=")[0] not in keys]
    code, _, err = plan(*kept, *typed)
    assert code == 2
    assert said in err
    assert f"-> {fix}" in err


def test_single_allowed_micro_batch_is_chosen(plan, own_machine) -> None:
    """An optimizer that steps in the backward pass cannot accumulate, so all is one micro-batch."""
    own_machine(GIB + 20 * MIB)
    one = ("memory.optimizer_in_backward=true", "train.max_grad_norm=null")
    _, out, _ = plan(*AUTO, *one)
    assert row(out, "batch.per_device").split()[1] == "64"
    assert "smallest" in row(out, "batch.per_device")


@pytest.mark.slow
def test_each_device_has_its_own_micro_batch(plan) -> None:
    typed = ("model=llama_1b", "data=synthetic", "batch=auto", "batch.target=256",
             "data.num_samples=4096")  # fmt: skip
    code, out, _ = plan(*typed, "hardware=all")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    last = {line.split()[0]: line.split()[-1] for line in out.splitlines() if line.split()}
    assert last["t4"] == "none"
    sizes = [int(last[option]) for option in ("a100_80", "h200", "b200")]
    assert sizes == sorted(sizes)
    assert all(256 % size == 0 for size in sizes)
    _, out, _ = plan(*typed, "hardware=all", "--json")
    found = {row["hardware"]: row["per_device"] for row in json.loads(out)}
    assert str(found["b200"]) == last["b200"]
    _, out, _ = plan(*typed, "hardware=a100_80")
    assert row(out, "batch.per_device").split()[1] == last["a100_80"]


def test_auto_batch_for_another_device_is_not_probed(plan) -> None:
    _, out, _ = plan("model=llama_1b", "data=synthetic", "batch=auto", "batch.target=256",
                     "hardware=rtx3090", "precision=bf16_pure", "tracker=none")  # fmt: skip
    assert "not probed" in row(out, "batch.per_device")


# --- runs that start ----------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, capsys):
    """A command whose run is not started; its exit code and all that was printed."""
    monkeypatch.setattr(running, "run_single", lambda *_: pytest.fail("no run is started here"))

    def typed(*arguments: str) -> tuple[int, str]:
        def stop(plan, head=None, as_json=False):
            print("per_device", plan.batch.per_device)
            return 0

        monkeypatch.setattr(running, "run_planned", stop)
        code = workflows.main([*AUTO, *arguments])
        captured = capsys.readouterr()
        return code, captured.err + captured.out

    return typed


@pytest.fixture
def probed(monkeypatch):
    """Probes end as scripted; what was asked for is remembered."""

    class Script(list):
        end = Probed(True)

    script = Script()

    def probe(plan):
        script.append(plan.batch.per_device)
        return script.end

    monkeypatch.setattr("eke.launch.processes.run_attempt.probe", probe)
    return script


@pytest.fixture
def tight(own_machine, monkeypatch):
    """Memory with which formulas leave some micro-batches open; no trace can be made."""
    from eke.estimate.memory import trace_client

    monkeypatch.setattr(
        trace_client, "get_or_run_trace", lambda plan: trace_client.TraceResult(None, "not here")
    )
    own_machine(GIB + 20 * MIB)


def test_plan_notes_a_forecast_by_formulas(tight, capsys) -> None:
    assert cli(["plan", "-v", *AUTO]) == 0
    said = row(capsys.readouterr().out, "batch.per_device")
    assert "not here" in said


def test_open_batch_sizes_are_probed_once(run, probed, tight) -> None:
    code, out = run()
    assert code == 0
    assert probed, "nothing was open"
    assert f"={probed[0]} fits" in out
    assert out.endswith(f"per_device {max(probed)}\n")
    before = list(probed)
    assert run()[1] == f"per_device {max(before)}\n"
    assert probed == before, "the same command asks no more"


def test_batch_that_runs_out_of_memory_is_not_chosen(run, probed, tight) -> None:
    probed.end = Probed(False, "out of memory in forward")
    _, out = run()
    taken = int(out.split()[-1])
    assert taken < min(probed)
    assert "out of memory" in out


def test_crashed_probe_keeps_the_forecast(run, probed, tight) -> None:
    probed.end = Probed(None, "the worker ended with exit code 3")
    _, out = run()
    assert len(probed) == 1
    assert "exit code 3" in out
    assert int(out.split()[-1]) < probed[0]


def test_smallest_batch_that_ran_out_of_memory_is_rejected(run, probed, own_machine, tight) -> None:
    own_machine(GIB + 15 * MIB)
    probed.end = Probed(False, "out of memory in forward")
    code, out = run()
    assert code == 2, out
    assert "ran out of memory in a probe" in out
    assert "ignore_forecast=true" in out
    code, out = run("ignore_forecast=true")
    assert out.endswith("per_device 1\n")


def test_externally_started_processes_are_not_probed(run, probed, tight, own_machine, monkeypatch):
    own_machine(2 * (GIB + 20 * MIB))
    for name, value in started_by_torchrun(0, 2).items():
        monkeypatch.setenv(name, value)
    code, out = run(*TWO)
    assert code == 0, out
    assert probed == []


# --- in a cluster -------------------------------------------------------------------------------


def test_slurm_memory_request_is_used_for_batch_auto(plan) -> None:
    typed = ("hydra/launcher=slurm", "hardware=cpu", *AUTO, "plan_only=true")
    assert workflows.main(["-m", *typed]) == 0


@pytest.mark.parametrize(
    ("asked", "size"),
    [("64G", 64 * GIB), ("65536", 64 * GIB), ("65536MB", 64 * GIB), ("67108864K", 64 * GIB)],
)
def test_cluster_memory_is_read_like_sbatch(asked, size) -> None:
    open_ended = Device(kind="cpu", name="node")
    plan = plan_of("data=synthetic", f"resources.memory={asked}", device=open_ended)
    known = replace(plan, device=replace(open_ended, memory_bytes=size))
    assert memory_asked_for(plan) == room_for_a_batch(known) > 60 * GIB
