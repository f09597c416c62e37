"""One planted file in a folder of runs is one row: it stops no command for the other runs."""

import json
import os
import resource
import socket
import subprocess
import sys
from itertools import product

import pytest
from support import environment

BAD, GOOD = "0000000000000bad", "00000000000000aa"


def fifo(path) -> None:
    os.mkfifo(path)


def endless(path) -> None:
    path.symlink_to("/dev/zero")


def socket_file(path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket has at most 108 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def deep(path) -> None:
    path.write_text("[" * 200_000)


def deep_object(path) -> None:
    path.write_text('{"cells":' * 100_000)


def many_factors(path) -> None:
    factors = ",".join(f'"f{n}":{n}' for n in range(1_000_000))
    path.write_text(f'{{"outcome":"ok","choices":{{{factors}}}}}')


def sparse(path) -> None:
    with open(path, "wb") as file:
        file.truncate(3 << 30)


def other_types(path) -> None:
    said = {"outcome": "ok", "steps_done": 1e400, "failure": [1], "plan": 3, "loss": "x"}
    more = {"cells": [1, {"overrides": 3, "folder": {}}], "name": [1], "command": 7}
    path.write_text(json.dumps({**said, **more, "steps": {"total": 1e400}, "submission": 3}))


PLANTED = (fifo, endless, deep, other_types, socket_file, deep_object, many_factors, sparse)
FILES = ("record.json", "plan.json", ".lock", "metrics.jsonl", "attempts.jsonl", "config.yaml",
         "train.log", "slurm.json", "rerun.json", "sweep.json")  # fmt: skip

ALL = """
import contextlib, io, json, re, sys, time, traceback
from pathlib import Path
from eke import cli
import eke.cli.run_commands, eke.cli.report, eke.cli.sync
for command in json.loads(sys.argv[1]):
    out, start, wrong = io.StringIO(), time.monotonic(), ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            cli.main(command)
        except Exception:
            wrong = traceback.format_exc()
    seconds = time.monotonic() - start
    print(json.dumps([command[0], out.getvalue(), wrong, seconds]))
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10)
"""
MEMORY = 400 << 20
"""Bytes that all commands may take; Python and eke's modules are 60 MB of it."""


@pytest.mark.slow
def test_planted_file_does_not_stop_a_command(make_run, runs, tmp_path) -> None:
    commands = []
    every = (["status"], ["report", "--formats", "none"], ["sync", "--dry-run"], ["cancel"],
             ["logs"], ["compare", "--by", "torch"])  # fmt: skip
    for plant, name in product(PLANTED, FILES):
        folder = runs.with_name(f"runs-{plant.__name__}-{name}")
        for run, outcome in ((GOOD, "ok"), (BAD, "")):
            paths = make_run(run, outcome, "line\n")
            (paths.folder / name).unlink(missing_ok=True) if run == BAD else None
        plant(runs / BAD / name)
        runs.rename(folder)
        commands += [[first, str(folder), *rest] for first, *rest in every]
        commands += [[first, str(folder / BAD), *rest] for first, *rest in every]
    done = subprocess.run(
        [sys.executable, "-c", ALL, json.dumps(commands)],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=600,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)),
    )
    assert done.returncode == 0, done.stderr
    *answers, memory = map(json.loads, done.stdout.splitlines())
    for (command, out, wrong, _), typed in zip(answers, commands, strict=True):
        assert not wrong, f"{typed}: {wrong}"
        if command == "status" and BAD not in typed[1]:
            assert GOOD in out, typed
    assert memory < MEMORY
    slow = [(typed, each[3]) for typed, each in zip(commands, answers, strict=True) if each[3] > 5]
    assert not slow, "a second on a quiet machine"
