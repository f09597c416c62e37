"""A fault campaign: random kills and damage while sweeps run; typing the sweep again must mend all.

    python tests/faults.py --faults 200 --seed 1 --where local   # slurm: where SLURM_CONF names one
    python tests/faults.py --faults 200 --seed 1 --where local slurm --out results/faults.json

Each round is a sweep of two runs of one process and one of two, in a cluster on two nodes. While it
runs, faults hit it at random moments, most of them processes that train; when its command ends, it
is typed again. It must end with every run done, and then:

- no final record has changed since it was first seen, and no run that had one was started again;
- no two attempts of one run overlap: their rows follow each other, and their numbers differ;
- a last repetition without faults ends with exit code 0;
- every curve equals the one of a run of the same plan that nothing disturbs, bit for bit.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from live import SHORT, curve, rows_of  # noqa: E402  # the path makes it a script, too
from rank_server import RankServer  # noqa: E402  # as above
from support import REPO, environment, last_wins  # noqa: E402  # as above
from trained_ranks import undisturbed_curve  # noqa: E402  # as above

from eke.common.paths import RunPaths  # noqa: E402  # as above
from eke.plan.planner import read_plan  # noqa: E402  # as above

COMMON = last_wins(
    *SHORT, "train.steps=120", "train.checkpoint_every=10", "train.log_every=5",
    "train.keep_checkpoints=3", "model.dropout=0.1", "hardware=cpu",
)  # fmt: skip
PAIR = {
    "local": "distributed:ddp,distributed.num_processes:2",
    "slurm": "distributed:ddp,distributed.num_processes:2,distributed.num_nodes:2",
}
"""Two processes: of this machine, or one on each of two nodes."""

LAUNCHERS = {
    "local": ("launcher.cpu_slots=2",),
    "slurm": ("hydra/launcher=slurm", "slurm=minicluster", "slurm.max_restarts=50"),
}
MAX_REPETITIONS = 12
"""Without a fault, the sweep must have ended after one; faults go on for a while."""

ROUND_S = 600.0
"""One command that lasts longer hangs."""


class BrokenPromise(Exception):
    """An invariant does not hold."""


@dataclass
class Round:
    """One sweep under fire, in a folder of its own."""

    folder: Path
    where: str
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    final: dict[str, bytes] = field(default_factory=dict)
    """Run -> its final record when it was first seen."""
    started: dict[str, int] = field(default_factory=dict)
    """Run -> its attempts at that time."""

    def command(self) -> list[str]:
        """The sweep, as typed."""
        return [
            sys.executable,
            str(REPO / "train.py"),
            "-m",
            *LAUNCHERS[self.where],
            f"sweep.rows={{a:{{seed:1}},b:{{seed:2}},pair:{{{PAIR[self.where]}}}}}",
            *COMMON,
        ]

    def start(self) -> "subprocess.Popen[bytes]":
        """Type it."""
        with open(self.folder / "out.txt", "ab") as out:
            return subprocess.Popen(
                self.command(), cwd=self.folder, env=environment(self.folder), stdout=out,
                stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def runs(self) -> list[Path]:
        """Of this round."""
        return runs_of(self.folder)

    def look(self) -> None:
        """Remember final records, and see that those known have not changed."""
        for run in self.runs():
            try:
                text = (run / "record.json").read_bytes()
                record = json.loads(text)
            except (OSError, ValueError):
                if run.name in self.final:
                    raise BrokenPromise(f"{run}: its final record is gone") from None
                continue
            attempts = len(attempts_of(run))
            if run.name in self.final:
                if text != self.final[run.name]:
                    raise BrokenPromise(f"{run}: a final record was written over")
                if attempts != self.started[run.name]:
                    raise BrokenPromise(f"{run}: was started again after it had finished")
            elif record["outcome"] == "ok":
                self.final[run.name], self.started[run.name] = text, attempts

    def is_done(self) -> bool:
        """Whether every run has a final record."""
        return len(self.final) == 3


def runs_of(folder: Path) -> list[Path]:
    """Run folders below `runs`, which holds sweeps and a lock as well."""
    every = [path for path in folder.glob("runs/*") if path.is_dir()]
    return [path for path in every if not path.name.startswith("sweep-")]


def attempts_of(run: Path) -> list[dict]:
    """What attempts.jsonl says; a torn line is none."""
    found = []
    with contextlib.suppress(OSError):
        for line in (run / "attempts.jsonl").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def processes(folder: Path, *texts: str) -> list[int]:
    """Processes that work in a folder and whose command line has all of these texts."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                here = os.readlink(f"/proc/{entry}/cwd") == str(folder)
                if here and all(text in words for text in texts) and not words.startswith("srun"):
                    found.append(int(entry))
    return found


# --- faults: each returns whether there was something to hit ------------------------------------

Fault = Callable[[Round, "subprocess.Popen[bytes]"], bool]


def _hit(round_: Round, number: int, *texts: str) -> bool:
    victims = processes(round_.folder, *texts)
    if not victims:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(round_.rng.choice(victims), number)
    return True


def kill_worker(round_: Round, _: object) -> bool:
    """kill -9 of a process that trains: one of two ranks, or the only one."""
    return _hit(round_, signal.SIGKILL, "eke.training.loop.worker")


def kill_rank(round_: Round, _: object) -> bool:
    """kill -9 of one of two ranks."""
    agents = processes(round_.folder, "eke.training.loop.agent")
    for agent in agents:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{agent}/cmdline").read_bytes().split(b"\0")
            run = words[words.index(b"eke.training.loop.agent") + 1].decode()
            return _hit(round_, signal.SIGKILL, "eke.training.loop.worker", run)
    return False


def interrupt_worker(round_: Round, _: object) -> bool:
    """SIGTERM, as a batch system sends it, to a process that trains."""
    return _hit(round_, signal.SIGTERM, "eke.training.loop.worker")


def kill_agent(round_: Round, _: object) -> bool:
    """kill -9 of what has started two ranks."""
    return _hit(round_, signal.SIGKILL, "eke.training.loop.agent")


def kill_dispatcher(_: Round, command: "subprocess.Popen[bytes]") -> bool:
    """kill -9 of what was typed."""
    if command.poll() is not None:
        return False
    command.kill()
    return True


def interrupt_dispatcher(_: Round, command: "subprocess.Popen[bytes]") -> bool:
    """Ctrl-C."""
    if command.poll() is not None:
        return False
    command.send_signal(signal.SIGINT)
    return True


def kill_watcher(round_: Round, _: object) -> bool:
    """kill -9 of what a SLURM job runs."""
    return _hit(round_, signal.SIGKILL, "eke.launch.slurm.watcher")


def _jobs(*states: str) -> list[str]:
    said = subprocess.run(
        ["squeue", "--noheader", "--array", f"--states={','.join(states)}", "--format=%F_%K"],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    return said.split()


def requeue_job(round_: Round, _: object) -> bool:
    """`scontrol requeue`: what an operator or a preemption does."""
    jobs = _jobs("RUNNING")
    if jobs:
        subprocess.run(
            ["scontrol", "requeue", round_.rng.choice(jobs)], capture_output=True, check=False
        )
    return bool(jobs)


def cancel_job(round_: Round, _: object) -> bool:
    """`scancel` of a running or waiting job."""
    jobs = _jobs("RUNNING", "PENDING")
    if jobs:
        subprocess.run(["scancel", round_.rng.choice(jobs)], capture_output=True, check=False)
    return bool(jobs)


def damage_checkpoint(round_: Round, _: object) -> bool:
    """Cut a file of the newest checkpoint of a run that nobody works on short, or delete it."""
    files = [
        file
        for run in round_.runs()
        if run.name not in round_.final and not processes(round_.folder, "eke.training", run.name)
        for file in sorted(run.glob("checkpoints/*/*"))[-6:]
        if file.is_file()
    ]
    if not files:
        return False
    file = round_.rng.choice(files)
    with contextlib.suppress(OSError):
        if round_.rng.random() < 0.5:
            file.unlink()
        else:
            os.truncate(file, file.stat().st_size // 2)
    return True


def tear_line(round_: Round, _: object) -> bool:
    """Half a line at the end of metrics.jsonl or attempts.jsonl, as a power cut leaves it."""
    files = [
        run / name
        for run in round_.runs()
        for name in ("metrics.jsonl", "attempts.jsonl")
        if run.name not in round_.final
        and (run / name).exists()
        and not processes(round_.folder, "eke.training", run.name)
    ]
    if not files:
        return False
    with open(round_.rng.choice(files), "a") as file:
        file.write('{"train/global_st')
    return True


FAULTS: dict[str, list[tuple[Fault, int]]] = {
    "local": [
        (kill_worker, 5), (kill_rank, 4), (interrupt_worker, 3), (kill_agent, 2),
        (kill_dispatcher, 3), (interrupt_dispatcher, 2), (damage_checkpoint, 2), (tear_line, 1),
    ],
    "slurm": [
        (kill_worker, 7), (kill_rank, 6), (interrupt_worker, 4), (kill_agent, 3), (kill_watcher, 2),
        (kill_dispatcher, 2), (interrupt_dispatcher, 1), (requeue_job, 2), (cancel_job, 2),
        (damage_checkpoint, 1), (tear_line, 1),
    ],
}  # fmt: skip
"""With how often each is chosen: more than half hit processes that train."""


def run_round(round_: Round, budget: int, pause: tuple[float, float]) -> None:
    """One sweep with up to so many faults, to its end.

    Raises:
        BrokenPromise: it did not end, or not as it should.
    """
    faults, weights = zip(*FAULTS[round_.where], strict=True)
    for _ in range(MAX_REPETITIONS + budget):
        command = round_.start()
        deadline = time.monotonic() + ROUND_S
        due = time.monotonic() + round_.rng.uniform(*pause)
        while command.poll() is None:
            if time.monotonic() > deadline:
                command.kill()
                raise BrokenPromise(f"{round_.folder}: the command hangs")
            if round_.counts.total() < budget and time.monotonic() > due:
                fault = round_.rng.choices(faults, weights)[0]
                if fault(round_, command):
                    round_.counts[fault.__name__] += 1
                    due = time.monotonic() + round_.rng.uniform(*pause)
            round_.look()
            time.sleep(0.1)
        round_.look()
        if round_.is_done():
            break
    settle(round_)


def settle(round_: Round) -> None:
    """The last repetition, undisturbed: exit code 0, and all promises kept."""
    code = round_.start().wait(ROUND_S)
    round_.look()
    text = (round_.folder / "out.txt").read_text(errors="replace")
    if code or not round_.is_done():
        raise BrokenPromise(f"exit code {code}, {len(round_.final)} of 3 done\n{text[-3000:]}")
    if "Traceback" in text:
        raise BrokenPromise(f"a traceback was shown\n{text[-3000:]}")
    for run in round_.runs():
        seen = [a["attempt"] for a in attempts_of(run)]
        if len(seen) != len(set(seen)):
            raise BrokenPromise(f"{run}: two attempts of one number: {seen}")
        order = [row["attempt"] for row in rows_of(run)]
        if order != sorted(order):
            raise BrokenPromise(f"{run}: rows of two attempts between each other")


def campaign(
    where: str, faults: int, seed: int, root: Path, per_round: int = 8, pause=(0.5, 6.0)
) -> Counter[str]:
    """So many faults; what they were.

    Raises:
        BrokenPromise: something was lost, done twice, or came out different.
    """
    rng = random.Random(f"{where} {seed}")
    expected: dict[str, list[tuple[float, float]]] = {}
    total: Counter[str] = Counter()
    with contextlib.closing(RankServer(root)) as server:
        while total.total() < faults:
            folder = Path(tempfile.mkdtemp(prefix=f"{where}-", dir=root))
            one = Round(folder, where, rng)
            run_round(one, min(per_round, faults - total.total()), pause)
            for run in one.runs():
                if run.name not in expected:
                    plan = read_plan(RunPaths(run))
                    expected[run.name] = undisturbed_curve(server, plan, root / "undisturbed")
            if {run.name: curve(run) for run in one.runs()} != expected:
                raise BrokenPromise(f"{folder}: a curve differs from the undisturbed one")
            total += one.counts
            shutil.rmtree(folder)
            sys.stderr.write(f"{time.strftime('%T')} {where}: {total.total()} of {faults} faults\n")
            if not one.counts:
                break
    return total


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--where", nargs="+", choices=list(LAUNCHERS), default=["local"])
    parser.add_argument("--out", type=Path, help="write the counts there, as JSON")
    options = parser.parse_args()
    found = {}
    for where in options.where:
        with tempfile.TemporaryDirectory(prefix="eke-faults-") as root:
            began = time.time()
            counts = campaign(where, options.faults, options.seed, Path(root))
            found[where] = {"seed": options.seed, "faults": counts.total(), **counts,
                            "minutes": round((time.time() - began) / 60, 1)}  # fmt: skip
            sys.stdout.write(json.dumps(found[where]) + "\n")
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
