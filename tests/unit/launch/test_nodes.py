"""Machines of one run: who meets whom, what is told, and what a lost one means."""

import contextlib
import json
import os
import socket
import stat
import threading
import time
from dataclasses import replace

import pytest
from unit.launch.scripted import record_for
from unit.plan.cases import SYNTHETIC, plan_of

from eke.common.errors import ConfigError, EkeError
from eke.common.paths import RunPaths
from eke.common.process_env import (
    SlurmTask,
    check_started_tasks,
    current_cluster_task,
    is_first,
    num_allocated_nodes,
)
from eke.launch.processes import multi_node
from eke.launch.processes.multi_node import (
    Coordinator,
    JsonConnection,
    Rendezvous,
    follow,
    read_invitation,
)
from eke.launch.processes.worker_process import NodeAssignment, worker_command
from eke.plan.planner import Plan
from eke.plan.record import DeadRank, Failure, Record, write_end

PATIENCE_S = 60.0
SOON = {"_JOIN_TIMEOUT_S": 0.0, "POLL_S": 0.01, "LOOK_S": 0.02, "WORKER_POLL_S": 0.02}
"""How often the code looks, in tests."""

STEP = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}


@pytest.fixture(autouse=True)
def _this_host(monkeypatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name, seconds in SOON.items():
        monkeypatch.setattr(multi_node, name, seconds)


@pytest.fixture
def shell_worker(monkeypatch, tmp_path):
    """Processes of a machine are a line of shell; returns the run folder."""

    def command(paths: RunPaths, num_processes: int, spot: NodeAssignment) -> list[str]:
        text = (paths.folder / "command").read_text()
        return ["bash", "-c", f"echo {num_processes} {spot.node} {spot.endpoint} >$0; {text}",
                str(paths.folder / f"said_{spot.node}")]  # fmt: skip

    monkeypatch.setattr("eke.launch.processes.worker_process.worker_command", command)
    return tmp_path


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def started(file, count: int, problem: str = "") -> list[threading.Thread]:
    """The other machines of a run, each in a thread."""
    tasks = [SlurmTask(node, count, "s") for node in range(1, count)]
    threads = [
        threading.Thread(target=follow, args=[file, task, PATIENCE_S, problem]) for task in tasks
    ]
    for thread in threads:
        thread.start()
    return threads


def test_slurm_task_has_step_and_restart_numbers() -> None:
    assert current_cluster_task({}) == SlurmTask(0, 1, "")
    assert current_cluster_task({**STEP, "SLURM_PROCID": "2"}) == SlurmTask(2, 3, "12.0.0")
    again = {**STEP, "SLURM_PROCID": "0", "SLURM_RESTART_COUNT": "1"}
    assert current_cluster_task(again) == SlurmTask(0, 3, "12.0.1"), "an old invitation is none"


def test_worker_command_includes_the_node(tmp_path) -> None:
    paths = RunPaths(tmp_path)
    assert worker_command(paths, 1)[-2:] == ["eke.training.loop.worker", str(tmp_path)]
    assert worker_command(paths, 2)[-3:] == ["eke.training.loop.agent", str(tmp_path), "2"]
    one_each = worker_command(paths, 1, NodeAssignment(1, 2, "n1:29500"))
    assert one_each[-5:] == [str(tmp_path), "1", "1", "2", "n1:29500"], "an agent all the same"


def test_nodes_start_and_end_together(shell_worker) -> None:
    file = shell_worker / "nodes.json"
    (shell_worker / "command").write_text("sleep 0.1")
    with contextlib.closing(Coordinator(file, SlurmTask(0, 3, "s"))) as first:
        threads = started(file, 3)
        first.gather(PATIENCE_S)
        endpoint = first.begin(shell_worker, 4)
        wait_until(lambda: (shell_worker / "said_2").exists())
        first.end()
        assert not first.trouble()
    for node in (1, 2):
        assert (shell_worker / f"said_{node}").read_text() == f"4 {node} {endpoint}\n"
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert not file.exists()


def test_failure_on_another_node_is_reported(shell_worker) -> None:
    file = shell_worker / "nodes.json"
    (shell_worker / "command").write_text("kill -9 $$")
    with contextlib.closing(Coordinator(file, SlurmTask(0, 2, "s"))) as first:
        started(file, 2)
        first.gather(PATIENCE_S)
        first.begin(shell_worker, 1)
        wait_until(first.trouble)
        assert "SIGKILL" in first.trouble()
        assert not first.has_lost_one(), "it can be told to start again"
        (shell_worker / "command").write_text("true")
        first.gather(PATIENCE_S)
        first.begin(shell_worker, 1)
        first.end()
        assert not first.trouble(), "of the attempt before"


def test_hung_worker_is_killed(shell_worker, monkeypatch) -> None:
    monkeypatch.setattr(multi_node, "WORKER_END_S", 0.1)
    file = shell_worker / "nodes.json"
    (shell_worker / "command").write_text("trap : TERM; echo $$ >pid; while :; do sleep 0.1; done")
    monkeypatch.chdir(shell_worker)
    with contextlib.closing(Coordinator(file, SlurmTask(0, 2, "s"))) as first:
        started(file, 2)
        first.gather(PATIENCE_S)
        first.begin(shell_worker, 1)
        wait_until(lambda: (shell_worker / "pid").exists() and (shell_worker / "pid").read_text())
        first.end()
        with pytest.raises(ProcessLookupError):
            os.kill(int((shell_worker / "pid").read_text()), 0)


def test_lost_coordinator_lets_processes_save(shell_worker, monkeypatch) -> None:
    file = shell_worker / "nodes.json"
    (shell_worker / "command").write_text("sleep 0.2; echo saved >saved")
    monkeypatch.chdir(shell_worker)
    first = Coordinator(file, SlurmTask(0, 2, "s"))
    (thread,) = started(file, 2)
    first.gather(PATIENCE_S)
    first.begin(shell_worker, 1)
    for line in list(first._lines.values()):  # as the kernel does when a process is killed
        line.close()
    thread.join(PATIENCE_S)
    assert (shell_worker / "saved").exists()
    first.close()


def test_lost_node_is_detected(tmp_path) -> None:
    file = tmp_path / "nodes.json"
    with contextlib.closing(Coordinator(file, SlurmTask(0, 2, "s"))) as first:
        line = multi_node.connect(file, SlurmTask(1, 2, "s"), PATIENCE_S, "")
        first.gather(PATIENCE_S)
        line.close()
        wait_until(first.has_lost_one)
        assert first.trouble() == "node 1 of this run is gone"
        with pytest.raises(EkeError, match="node 1 of this run is gone"):
            first.gather(PATIENCE_S)


def test_unfit_node_reports_its_reason(tmp_path) -> None:
    file = tmp_path / "nodes.json"
    with contextlib.closing(Coordinator(file, SlurmTask(0, 2, "s"))) as first:
        started(file, 2, "planned for H200, and this node has T4")
        with pytest.raises(EkeError, match=r"node 1 .* H200"):
            first.gather(PATIENCE_S)


def test_missing_nodes_are_named(tmp_path) -> None:
    file = tmp_path / "nodes.json"
    with (
        contextlib.closing(Coordinator(file, SlurmTask(0, 3, "s"))) as first,
        pytest.raises(EkeError, match=r"nodes 1, 2 of 3 .* 127\.0\.0\.1"),
    ):
        first.gather(0.1)
    with pytest.raises(EkeError, match="cannot reach the first node"):
        follow(file, SlurmTask(1, 3, "s"), 0.1)


def test_coordinator_that_ended_early_is_not_awaited(tmp_path, monkeypatch) -> None:
    """It was killed a moment after its invitation: the others held their GPUs for half an hour."""
    monkeypatch.setattr("eke.launch.processes.multi_node._GONE_S", 0.2)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps(Rendezvous("7.0.0", "localhost", port, "secret")._asdict()))
    began = time.monotonic()
    with pytest.raises(EkeError, match=f"localhost:{port}.*refused"):
        follow(file, SlurmTask(1, 2, "7.0.0"), timeout_s=60)
    assert time.monotonic() - began < 30


def test_unauthenticated_connections_are_closed(tmp_path) -> None:
    file = tmp_path / "nodes.json"
    with contextlib.closing(Coordinator(file, SlurmTask(0, 2, "s"))) as first:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        found = read_invitation(file, "s")
        assert found is not None
        said = [
            b"", b"nonsense\n", b"[]\n", b'{"node": 1, "secret": "guessed"}\n',
            json.dumps({"node": 7, "secret": found.secret}).encode() + b"\n",
            json.dumps({"node": "1", "secret": found.secret}).encode() + b"\n",
        ]  # fmt: skip
        silent = socket.create_connection((found.host, found.port))
        for hello in said:
            with socket.create_connection((found.host, found.port)) as stranger:
                stranger.sendall(hello)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b"", "it is let go, and told nothing"
        line = multi_node.connect(file, SlurmTask(1, 2, "s"), PATIENCE_S, "")
        first.gather(PATIENCE_S)
        twice = multi_node.connect(file, SlurmTask(1, 2, "s"), PATIENCE_S, "")
        assert twice.receive() is None
        assert not first.trouble()
        twice.close()
        silent.close()
        line.close()


def test_silent_connections_are_closed_and_limited(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(multi_node, "HELLO_S", 0.3)
    file = tmp_path / "nodes.json"
    with (
        contextlib.ExitStack() as open_,
        contextlib.closing(Coordinator(file, SlurmTask(0, 2, "s"))) as first,
    ):
        found = read_invitation(file, "s")
        assert found is not None
        assert found.host == "127.0.0.1"
        before = threading.active_count()
        strangers = [
            open_.enter_context(socket.create_connection((found.host, found.port)))
            for _ in range(2 * multi_node.MAX_PENDING_CONNECTIONS)
        ]
        for number, stranger in enumerate(strangers):
            # Some trickle, and some say what takes a parser's breath away.
            stranger.sendall(b"{" if number % 2 else b"[" * 60_000 + b"\n")
        time.sleep(0.1)
        assert threading.active_count() - before <= 2 * (multi_node.MAX_PENDING_CONNECTIONS + 2)
        line = multi_node.connect(file, SlurmTask(1, 2, "s"), PATIENCE_S, "")
        first.gather(PATIENCE_S)
        for stranger in strangers:
            stranger.settimeout(PATIENCE_S)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        assert not first.trouble()
        line.close()


@pytest.mark.parametrize(
    ("typed", "resolved", "address"),
    [
        (None, "127.0.1.1", "0.0.0.0"),  # Debian's name for itself, which others know otherwise
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("head", "192.0.2.7", "0.0.0.0"),  # an address that is not this machine's own
        ("head", "", "0.0.0.0"),
    ],
)
def test_coordinator_listens_on_a_reachable_address(typed, resolved, address, monkeypatch) -> None:
    def resolve(_: str) -> str:
        if not resolved:
            raise socket.gaierror(-2, "Name or service not known")
        return resolved

    monkeypatch.delenv("MASTER_ADDR")
    if typed:
        monkeypatch.setenv("MASTER_ADDR", typed)
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    with multi_node.listen(4) as server:
        assert server.getsockname()[0] == address


def test_invitation_of_another_step_is_ignored(tmp_path) -> None:
    file = tmp_path / "nodes.json"
    assert read_invitation(file, "s") is None
    of_another = '{"step": "old", "host": "", "port": 1, "secret": ""}'
    for content in ("", "{", "[]", '{"step": "s"}', of_another):
        file.write_text(content)
        assert read_invitation(file, "s") is None


def test_broken_connection_ends_receiving() -> None:
    ours, theirs = socket.socketpair()
    line = JsonConnection(ours)
    assert JsonConnection(theirs).send({"begin": "x"})
    assert line.receive() == {"begin": "x"}
    theirs.send(b'{"idle": tr')
    theirs.close()
    assert line.receive() is None
    line.close()
    assert not line.send({}), "nobody is there"


BY_TORCHRUN = {"LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


# --- who is there ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "machines"),
    [
        ({}, 1),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, 2),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "5", **BY_TORCHRUN}, 2),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": "0", **BY_TORCHRUN}, 1),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "none", "RANK": "0", **BY_TORCHRUN}, 8),
        ({"SLURM_STEP_NUM_TASKS": "x", "SLURM_PROCID": "1"}, 1),
    ],
)
def test_available_nodes_are_counted(variables, machines, monkeypatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert num_allocated_nodes() == machines


def test_task_and_node_counts_must_agree(monkeypatch) -> None:
    check_started_tasks("a run", 2)  # the launcher's own business, where srun has started nothing
    for name, value in {**STEP, "SLURM_PROCID": "1"}.items():
        monkeypatch.setenv(name, value)
    check_started_tasks("a run", 3)
    with pytest.raises(ConfigError, match="srun started 3 tasks"):
        check_started_tasks("a sweep", 1)
    assert not is_first()


# --- what the rules about machines prevent --------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "world_size", "num_nodes"), [("none", 1, 2), ("ddp", 3, 2)], ids=["none", "uneven"]
)
def test_uneven_processes_per_node_start_a_wrong_total(option, world_size, num_nodes) -> None:
    plan = with_processes(option, world_size, num_nodes)
    assert plan.processes_per_node * num_nodes != plan.batch.world_size


def test_single_node_starts_all_processes(tmp_path, monkeypatch) -> None:
    started = []
    monkeypatch.setattr(multi_node, "RunAttempt", lambda plan, place, count: started.append(count))
    multi_node.launch_attempt(with_processes("ddp", 4, 2), RunPaths(tmp_path), None)
    assert started == [4]


def with_processes(option: str, world_size: int, num_nodes: int) -> Plan:
    plan = plan_of(*SYNTHETIC)
    sharing = replace(
        plan.config.distributed, option=option, num_processes=world_size, num_nodes=num_nodes
    )
    return replace(
        plan,
        config=replace(plan.config, distributed=sharing),
        batch=replace(plan.batch, world_size=world_size),
    )


class Attempt:
    """In place of LiveRun: processes of this machine."""

    def __init__(self, record: Record) -> None:
        self.record, self.killed = record, 0

    def is_over(self) -> bool:
        return bool(self.killed)

    def kill(self) -> None:
        self.killed += 1

    def finish(self) -> Record:
        return self.record

    @classmethod
    def stand_in(cls, record: Record, monkeypatch) -> "Attempt":
        """For the processes here of the next LedRun."""
        attempt = cls(record)

        def start(led: multi_node.MultiNodeRun, _: Plan, paths: RunPaths, *__, **___) -> None:
            led.paths = paths

        monkeypatch.setattr(multi_node.RunAttempt, "__init__", start)
        for name in ("is_over", "kill", "finish"):
            act = getattr(attempt, name)
            monkeypatch.setattr(multi_node.RunAttempt, name, lambda _, act=act: act())
        return attempt


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (Failure("worker", "killed by SIGKILL: by hand"), "node 1 of this run is gone"),
        (Failure("backward", "gloo: closed", lost_contact=True), "node 1 of this run is gone"),
        (Failure("worker", "process 3 of this run: killed"), "process 3 of this run: killed"),
    ],
    ids=["nobody knows", "lost contact", "somebody knows"],
)
def test_orphaned_processes_are_killed_with_a_recorded_reason(
    failure, told, tmp_path, monkeypatch
) -> None:
    """Whoever waits for a lost machine through NCCL would wait for half an hour."""
    monkeypatch.setattr(multi_node, "LEFT_BEHIND_S", 0.0)
    file, plan = tmp_path / "nodes.json", with_processes("ddp", 2, 2)
    record = record_for("a", "crashed", 7)
    record.failure = failure
    if told == failure.message:
        write_end(RunPaths(tmp_path), DeadRank(record.attempt, 3, -9, 0))
    attempt = Attempt.stand_in(record, monkeypatch)
    with contextlib.closing(Coordinator(file, SlurmTask(0, 2, "s"))) as first:
        line = multi_node.connect(file, SlurmTask(1, 2, "s"), PATIENCE_S, "")
        led = multi_node.launch_attempt(plan, RunPaths(tmp_path), first)
        assert not led.is_over()
        line.close()
        wait_until(led.is_over)
        assert attempt.killed
        assert led.finish().failure.message == told
        assert led.finish().outcome == "crashed"


def test_agreed_end_is_kept(tmp_path, monkeypatch) -> None:
    file, plan = tmp_path / "nodes.json", with_processes("ddp", 2, 2)
    record = record_for("a", "preempted", 7)
    Attempt.stand_in(record, monkeypatch)
    with contextlib.closing(Coordinator(file, SlurmTask(0, 2, "s"))) as first:
        line = multi_node.connect(file, SlurmTask(1, 2, "s"), PATIENCE_S, "")
        led = multi_node.launch_attempt(plan, RunPaths(tmp_path), first)
        line.close()
        wait_until(first.trouble)
        assert led.finish() == record_for("a", "preempted", 7)
