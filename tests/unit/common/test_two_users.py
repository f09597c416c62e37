"""What another user plants where this one's runs lie: nothing of his is written over or trusted."""

import json
import os
from pathlib import Path

import pytest
from two_users import ATTACKER, VICTIM, hand, machine, needs_root, python, train

from eke.common.paths import RunPaths

pytestmark = needs_root

__all__ = ["machine"]

WRITERS = {
    ".lock": "from eke.launch.processes.run_dir import lock_run_folder\n"
    "with lock_run_folder(RunPaths(P(1))): pass",
    "train.log": "from eke.launch.processes.worker_process import Worker\nWorker(RunPaths(P(1)))",
    "train-node1.log": "from eke.launch.processes.worker_process import NodeAssignment, Worker\n"
    "Worker(RunPaths(P(1)), spot=NodeAssignment(1, 2, 'x:1'))",
    "rank log": "from eke.training.loop.worker import _redirect_output\n"
    "_redirect_output(RunPaths(P(1)), 1)",
    "metrics.jsonl": "from eke.common.files import terminate_last_line\n"
    "terminate_last_line(RunPaths(P(1)).metrics)\n"
    "from eke.common.files import append_line\nappend_line(RunPaths(P(1)).metrics, '{}')",
    "attempts.jsonl": "from eke.plan.record import start_attempt\n"
    "start_attempt(RunPaths(P(1)), {})",
    "sync lock": "from eke.results.trackers.sync.account import lock_for_sync\n"
    "with lock_for_sync(RunPaths(P(1))): pass",
    "operators lock": "from eke.training.distributed.build_operators import BuildLock\n"
    "BuildLock(str(P(1) / 'lock')).try_acquire()",
}
"""Name of a file -> what writes it in the folder that is the first argument."""

NAMES = {
    "rank log": lambda run: RunPaths(run).rank_log(1).name,
    "sync lock": lambda run: RunPaths(run).sync_lock.name,
    "train-node1.log": lambda run: RunPaths(run).node_log(1).name,
    "operators lock": lambda run: "lock.turn",
}
RECORD = "from eke.common.files import write_json\nwrite_json(P(1) / 'record.json', 1)"
SHOW = "from eke.common.paths import RunPaths\n"


@pytest.fixture
def run(machine) -> Path:
    """The victim's own run folder, in which everybody may write."""
    runs = machine / "runs"
    runs.mkdir()
    runs.chmod(0o777)
    folder = runs / "0123456789abcdef"
    folder.mkdir()
    return hand(folder, VICTIM, 0o777)


EACH = """
import traceback
P, given = lambda n: folder, sys.argv
for folder in map(Path, given[2:]):
    try:
        exec(given[1])
    except Exception:
        traceback.print_exc()
"""


@pytest.mark.parametrize("what", WRITERS)
def test_run_files_are_not_opened_through_links(what, run, machine) -> None:
    thesis, new = machine / "victim" / "thesis.tex", machine / "victim" / ".bash_profile"
    name = NAMES[what](run) if what in NAMES else what
    folders = [run.with_name(f"{number}{run.name[1:]}") for number in range(1, 5)]
    for folder in folders:
        folder.mkdir()
        hand(folder, VICTIM, 0o777)
    (folders[0] / name).symlink_to(thesis)
    (folders[1] / name).symlink_to(new)
    os.mkfifo(folders[2] / name)
    (folders[2] / name).chmod(0o666)
    for folder in folders[:3]:
        hand(folder / name, ATTACKER)
    os.link(thesis, folders[3] / name)
    python(VICTIM, EACH, f"{SHOW}{WRITERS[what]}", *folders, cwd=machine / "victim")
    assert thesis.read_text() == "years of work"
    assert not new.exists()


@pytest.mark.parametrize("what", [*WRITERS, "record.json"])
def test_folder_of_another_user_is_not_written(what, run, machine) -> None:
    hand(run, ATTACKER)
    before = sorted(os.listdir(run))
    code = f"{SHOW}{WRITERS.get(what, RECORD)}"
    done = python(VICTIM, code, run, cwd=machine / "victim")
    assert sorted(os.listdir(run)) == before
    if what not in ("sync lock",):  # a folder that cannot be written cannot be claimed: it is sent
        assert f"another user (uid {ATTACKER})" in done.err
    if what == ".lock":
        assert "paths.runs=" in done.err


def test_record_replaces_a_link_but_not_its_target(run, machine) -> None:
    (run / "record.json").symlink_to(machine / "victim" / "thesis.tex")
    hand(run / "record.json", ATTACKER)
    assert python(VICTIM, RECORD, run, cwd=machine / "victim").code == 0
    assert (machine / "victim" / "thesis.tex").read_text() == "years of work"
    assert (run / "record.json").is_file()
    assert not (run / "record.json").is_symlink()


@pytest.mark.slow
def test_dangling_lock_link_creates_no_file(machine) -> None:
    runs = machine / "runs"
    runs.mkdir()
    runs.chmod(0o777)
    new = machine / "victim" / ".bash_profile"
    hand(runs, ATTACKER)
    runs.chmod(0o777)
    (runs / ".submitting").symlink_to(new)
    hand(runs / ".submitting", ATTACKER)
    code = (
        "os.umask(0o077)\nfrom eke.launch.slurm.submit_array import submitting\n"
        "with submitting(P(1) / 'sweep-1' / 'slurm'): print('submits')"
    )
    done = python(VICTIM, code, runs, cwd=machine / "victim")
    assert "submits" not in done.out
    assert "is a link" in done.err
    assert not new.exists()
    (runs / ".submitting").unlink()
    assert "submits" in python(VICTIM, code, runs, cwd=machine / "victim").out
    # Everybody who submits from the same folder may lock it, and it is no one else's.
    hand(runs / "sweep-1", ATTACKER)
    again = python(ATTACKER, code, runs, cwd=machine / "attacker")
    assert "submits" in again.out, again.err


@pytest.mark.parametrize("owner", [VICTIM, 0, ATTACKER], ids=["caller", "root", "another"])
def test_runs_folder_may_be_a_link_of_the_caller_or_root(owner, machine) -> None:
    scratch = machine / "scratch"
    scratch.mkdir()
    hand(scratch, VICTIM)
    (machine / "runs").symlink_to(scratch)
    hand(machine / "runs", owner)
    code = (
        "from eke.launch.processes.run_dir import lock_run_folder\n"
        "from eke.common.paths import RunPaths\n"
        "from eke.common.files import write_json\n"
        "with lock_run_folder(RunPaths(P(1))): write_json(P(1) / 'record.json', {})"
    )
    done = python(VICTIM, code, machine / "runs" / "0123456789abcdef", cwd=machine / "victim")
    written = (scratch / "0123456789abcdef" / "record.json").exists()
    assert written == (owner != ATTACKER), done.err
    if owner == ATTACKER:
        assert "a link that another user" in done.err


PLAN = '{"steps": {"total": 20}}'


@pytest.mark.parametrize("command", ["status", "report"])
def test_runs_of_another_user_are_read(command, run, machine) -> None:
    (run / "plan.json").write_text(PLAN)
    (run / "config.yaml").write_text("# seed=1\n")
    hand(run, ATTACKER, 0o755)
    code = "from eke import cli\nsys.exit(cli.main(json.loads(sys.argv[1])))"
    words = f'["{command}", "{run.parent}"]'
    done = python(VICTIM, code, words, cwd=machine / "victim")
    assert run.name in done.text or "seed=1" in done.text
    assert "Traceback" not in done.text
    assert done.code == 0, done.text


ACT = "from eke import cli\nsys.exit(cli.main([sys.argv[1], sys.argv[2]]))"
PROGRAM = """#!/bin/sh
case "$0 $*" in
*squeue*) echo "7|0|RUNNING|n1|eke-x|None" ;;
*) echo "$0 $*" >> {proof} ;;
esac
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "uid", "owner"),
    [
        ("status", VICTIM, ATTACKER),
        ("status", VICTIM, VICTIM),
        ("logs", VICTIM, ATTACKER),
        ("cancel", VICTIM, VICTIM),
        ("cancel", 0, ATTACKER),
    ],
)
def test_commands_and_jobs_of_a_foreign_file_are_ignored(command, uid, owner, run, machine) -> None:
    proof, tools = machine / "victim" / "proof", machine / "tools"
    tools.mkdir()
    for name in ("squeue", "scancel", "sacct"):
        (tools / name).write_text(PROGRAM.format(proof=proof))
        (tools / name).chmod(0o755)
    (run / "plan.json").write_text(PLAN)
    theirs = machine / "attacker" / "eke-x.json"
    submission = {"schema_version": 1, "name": "x", "created": 0, "runs": [str(run)],
                  "max_restarts": 0, "job_id": "7"}  # fmt: skip
    theirs.write_text(json.dumps(submission))
    (run / "slurm.json").write_text(json.dumps({"submission": str(theirs), "element": 0}))
    (run / "command.json").write_text(json.dumps({"prefix": [str(tools / "scancel")]}))
    hand(run, ATTACKER)
    os.chown(run, owner, owner)  # also one's own folder, in which everybody may write
    path = f"{tools}:{os.environ['PATH']}"
    done = python(uid, ACT, command, run.parent, cwd=machine / "victim", PATH=path)
    assert not proof.exists(), proof.read_text()
    assert done.code == 0, done.text
    if uid == owner:
        for file in (run / "slurm.json", run / "command.json"):
            os.chown(file, uid, uid)
        python(uid, ACT, command, run.parent, cwd=machine / "victim", PATH=path)
        assert "check" in proof.read_text(), "one's own prefix is asked"
        assert ("scancel 7_0" in proof.read_text()) == (command == "cancel")


def test_report_is_written_through_own_link(run, machine) -> None:
    (run / "plan.json").write_text(PLAN)
    hand(run.parent, VICTIM)
    (machine / "victim" / "runs").symlink_to(run.parent)
    hand(machine / "victim" / "runs", VICTIM)
    code = "from eke import cli\nsys.exit(cli.main(['report', 'runs']))"
    done = python(VICTIM, code, cwd=machine / "victim")
    assert done.code == 0, done.text
    assert (run.parent / "report.md").exists()


CACHES = {
    "what was learned": "from eke.data.sources.content_hash import remember\n"
    "remember(P(1) / 'x', 'y')",
    "step time": "from eke.estimate.time.time_history import add_line\nadd_line(P(1) / 'x', '{}')",
    "store": "from eke.data.preparation.writer import locked\nwith locked(P(1) / 'store'): pass",
    "swap": "from eke.training.distributed.build_operators import make_private_dir\n"
    "make_private_dir(P(1))",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CACHES)
def test_cache_of_another_user_is_not_written(what, machine) -> None:
    cache = machine / "cache"
    cache.mkdir()
    hand(cache, ATTACKER, 0o777)
    python(VICTIM, CACHES[what], cache, cwd=machine / "victim")
    assert not os.listdir(cache)


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["folder", "link", "own link", "own"])
def test_cache_made_by_another_user_is_not_read(planted, machine) -> None:
    cache, other = machine / "cache", machine / "other"
    cache.mkdir()
    other.mkdir()
    hand(other, VICTIM if planted in ("link", "own link") else ATTACKER)
    (cache / "eke").symlink_to(other) if "link" in planted else (cache / "eke").mkdir()
    hand(cache, VICTIM if "own" in planted else ATTACKER, 0o777)
    typed = ["plan", "--quick", "hardware=cpu", "tracker=none"]
    code = f"from eke import cli\nsys.exit(cli.main({typed}))"
    done = python(VICTIM, code, cwd=machine / "victim", XDG_CACHE_HOME=str(cache))
    if "own" in planted:
        assert done.code == 0, done.text
    else:
        assert (done.code, os.listdir(other)) == (2, [])
        assert "export XDG_CACHE_HOME=" in done.err


CHOOSE = """
from eke.training.loop.environment import choose_compiled_code_folders
choose_compiled_code_folders()
print(os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"], sep="\\n")
"""


@pytest.mark.parametrize("planted", ["", "folder", "link", "own, 0777", "file"])
def test_compiled_code_is_private_to_its_user(planted, machine) -> None:
    temporary = machine / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    place = temporary / f"eke-{VICTIM}"
    if planted in ("folder", "own, 0777"):
        place.mkdir()
        hand(place, ATTACKER if planted == "folder" else VICTIM, 0o777)
    elif planted == "link":
        place.symlink_to(machine / "attacker")
        hand(place, ATTACKER)
    elif planted:
        place.touch()
        hand(place, ATTACKER)
    done = python(VICTIM, CHOOSE, cwd=machine / "victim", TMPDIR=str(temporary))
    assert done.code == 0, done.err
    for folder in map(Path, done.out.splitlines()):
        assert folder.stat().st_uid == VICTIM
        assert folder.stat().st_mode & 0o777 == 0o700
        assert not folder.is_relative_to(place) or not planted


@pytest.mark.parametrize("variable", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
@pytest.mark.parametrize("what", ["foreign", "writable", "own"])
def test_configured_compile_cache_is_checked(what, variable, machine) -> None:
    place = machine / "compiled"
    place.mkdir()
    owner, mode = (ATTACKER, 0o777) if what == "foreign" else (VICTIM, 0o700)
    hand(place, owner, 0o777 if what == "writable" else mode)
    given = {variable: str(place), "TMPDIR": str(machine / "victim")}
    done = python(VICTIM, CHOOSE, cwd=machine / "victim", **given)
    if what == "own":
        assert str(place) in done.out, "it is checked, and not replaced"
    else:
        assert done.code
        assert f"export {variable}=" in done.err


LEASE = """
from eke.launch.devices import holder_of, try_lease
print(try_lease("cpu-0"), holder_of("cpu-0"))
"""


@pytest.mark.parametrize("planted", ["private folder", "fifo", "link", "words", "folder's link"])
def test_spoiled_lease_is_reported_with_a_fix(planted, machine) -> None:
    folder = machine / "leases"
    if planted == "folder's link":
        (machine / "attacker" / "x").mkdir()
        folder.symlink_to(machine / "attacker" / "x")
        hand(folder, ATTACKER)
    else:
        folder.mkdir()
        lock = folder / "cpu-0.lock"
        if planted == "fifo":
            os.mkfifo(lock)
        elif planted == "link":
            lock.symlink_to(machine / "victim" / "thesis.tex")
        elif planted == "words":
            lock.write_text("proc\x1b]0;PWN\x07\x1b[2J")
            lock.chmod(0o444)
        hand(folder, ATTACKER, 0o700 if planted == "private folder" else 0o1777)
    done = python(VICTIM, LEASE, cwd=machine / "victim", EKE_LEASES=str(folder))
    assert "export EKE_LEASES=FOLDER" in done.err
    assert "\x1b" not in done.text
    assert (machine / "victim" / "thesis.tex").read_text() == "years of work"


@pytest.mark.slow
def test_doctor_warns_about_a_shared_runs_folder(run, machine) -> None:
    code = "from eke.cli.doctor import _find_risks\nprint(*_find_risks(P(1)), sep='\\n')"

    def risks(uid: int) -> str:
        return python(uid, code, run.parent, cwd=machine / "victim").out

    assert "chmod +t" in risks(VICTIM)
    assert "folders of other users" not in risks(VICTIM)
    run.parent.chmod(0o1777)
    assert not risks(VICTIM).strip()
    hand(run, ATTACKER)
    assert f"uid {ATTACKER}" in risks(VICTIM)
    assert "root" in risks(0)


CHECKPOINTS = """
from eke.training import checkpoint
from eke.common.files import write_json
for step in map(int, sys.argv[2:]):
    try:
        unfinished = checkpoint.unfinished_folder(P(1), step, 7)
        checkpoint.begin_checkpoint(unfinished)
        (unfinished / "model").mkdir()
        (unfinished / "model" / "weights").write_text("mine")
        checkpoint.finish_checkpoint(unfinished, step, keep=1)
    except OSError as error:
        print(type(error).__name__)
"""


@pytest.mark.slow  # imports torch
def test_checkpoints_are_neither_written_nor_pruned_through_a_link(run, machine) -> None:
    other = machine / "victim" / "other-tool"
    for name in ("step-100", "step-00000002", "step-00000001-important"):
        (other / name).mkdir(parents=True)
        (other / name / "weights").write_text("precious")
    hand(other, VICTIM)
    (run / "checkpoints").symlink_to(other)
    hand(run / "checkpoints", ATTACKER)
    done = python(VICTIM, CHECKPOINTS, run / "checkpoints", 5, cwd=machine / "victim")
    assert "UntrustedPathError" in done.out, done.text
    assert len(list(other.glob("*/weights"))) == 3
    (run / "checkpoints").unlink()
    folder = run / "checkpoints"
    folder.mkdir()
    (folder / "step-00000001").symlink_to(other)
    (folder / ".step-00000005.7.tmp").symlink_to(other)
    (folder / ".step-00000003.9.tmp").symlink_to(other)
    (folder / "step-00000002-important").mkdir()
    hand(folder, VICTIM, 0o777)
    done = python(VICTIM, CHECKPOINTS, folder, 4, 5, 6, cwd=machine / "victim")
    assert len(list(other.glob("*/weights"))) == 3
    assert not (other / "weights").exists()
    left = {each.name for each in folder.iterdir() if not each.is_symlink()}
    assert left == {"step-00000006", "step-00000002-important"}, done.text


@pytest.mark.slow
def test_run_folder_of_another_user_is_rejected_with_a_fix(machine) -> None:
    typed = ("experiment=smoke", "hardware=cpu", "tracker=none", "train.steps=2")
    runs = machine / "runs"
    runs.mkdir()
    runs.chmod(0o777)
    where = f"paths.runs={runs}"
    planned = train(VICTIM, *typed, where, "plan_only=true", "--json", cwd=machine / "victim")
    name = json.loads(planned.out)["run_id"]
    (runs / name / "checkpoints").mkdir(parents=True)
    (runs / name / ".lock").symlink_to(machine / "victim" / "thesis.tex")
    (runs / name / "train.log").symlink_to(machine / "victim" / ".bashrc")
    hand(runs / name, ATTACKER, 0o777)
    done = train(VICTIM, *typed, where, cwd=machine / "victim")
    assert done.code == 2, done.text
    assert f"another user (uid {ATTACKER})" in done.err
    assert "-> paths.runs=" in done.err
    assert (machine / "victim" / "thesis.tex").read_text() == "years of work"
    assert not (machine / "victim" / ".bashrc").exists()
    # The victim's own folder, in which others may plant links: no file of his is written either.
    hand(runs / name, VICTIM)
    done = train(VICTIM, *typed, where, cwd=machine / "victim")
    assert done.code == 2, done.text
    assert "is a link" in done.err
    (runs / name / ".lock").unlink()
    done = train(VICTIM, *typed, where, cwd=machine / "victim")
    assert "is a link" in done.text, done.text
    assert "Traceback" not in done.text
    assert not (machine / "victim" / ".bashrc").exists()
