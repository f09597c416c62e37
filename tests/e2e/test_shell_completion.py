"""Completion in real shells: bash and zsh at a terminal, fish by its own `complete -C`."""

import fcntl
import os
import pty
import re
import select
import shlex
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from support import REPO, environment

PATIENCE_S = 20  # nobody waits that long: a busy machine may
READY = "eke-is-ready>"
BASH, ZSH, FISH = (shutil.which(name) for name in ("bash", "zsh", "fish"))
needs_bash = pytest.mark.skipif(BASH is None, reason="bash is not installed")
needs_zsh = pytest.mark.skipif(ZSH is None, reason="zsh is not installed")
needs_fish = pytest.mark.skipif(FISH is None, reason="fish is not installed")


class Terminal:
    """A shell that believes a person sits before it."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str]) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=env,
            start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Read until something matches; everything read before it is forgotten."""
        deadline = time.monotonic() + PATIENCE_S
        while not (match := re.search(pattern, plain(self.seen))):
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.master], [], [], max(left, 0))
            assert ready, f"no {pattern!r} in {plain(self.seen)!r}"
            self.seen += os.read(self.master, 4096).decode(errors="replace")
        self.seen = ""
        return match[0]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def plain(text: str) -> str:
    """Without colours and cursor movements."""
    return re.sub(r"\x1b[\[(][0-9;?]*[a-zA-Z]|\x1b[=>]|[\r\x07\x08]", "", text)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with train.py, another script, a data file, and `python` and `eke` on the path."""
    place = tmp_path_factory.mktemp("place")
    shutil.copy(REPO / "train.py", place)
    (place / "src").symlink_to(REPO / "src")
    (place / "other.py").write_text("open('it ran', 'w')\n")
    (place / "zebra data.txt").write_text("")
    programs = place / "bin"
    programs.mkdir()
    for name in ("python", "python3"):
        write_program(programs / name, shlex.quote(sys.executable))
    write_program(programs / "eke", f"{shlex.quote(sys.executable)} -m eke")
    return place


def write_program(path: Path, command: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)


def shell_environment(place: Path) -> dict[str, str]:
    return {
        **environment(place),
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "HOME": str(place),
        "TERM": "dumb",
        "PS1": READY,
        "INPUTRC": "/dev/null",
    }


@pytest.mark.parametrize(
    ("words", "wanted", "code"),
    [
        (["--help", "memory"], "memory.every_n\x1b[0m", 0),
        (["seed=x"], "\x1b[31mseed = x\x1b[0m", 2),
    ],
    ids=["help", "error"],
)
def test_screen_has_colours_and_width_of_the_terminal(place, words, wanted, code) -> None:
    env = {**shell_environment(place), "TERM": "xterm", "COLUMNS": ""}
    terminal = Terminal([sys.executable, "train.py", *words], place, env)
    try:
        fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        terminal.process.wait(PATIENCE_S)
        shown = os.read(terminal.master, 1 << 16).decode()
    finally:
        terminal.close()
    assert terminal.process.returncode == code
    assert wanted in shown
    assert max(len(plain(line)) for line in shown.splitlines()) <= 60


@pytest.fixture(scope="module")
def bash(place):
    terminal = Terminal([BASH, "--norc", "--noprofile", "-i"], place, shell_environment(place))
    try:
        terminal.wait_for(READY)
        for setting in (
            "show-all-if-ambiguous on",
            "bell-style none",
            "enable-bracketed-paste off",
        ):
            terminal.type(f"bind 'set {setting}'\n")
            terminal.wait_for(rf"'\s+{READY}")
        terminal.type('eval "$(python train.py -sc install=bash)"\n')
        terminal.wait_for(rf"\)\"\s+{READY}")
        yield terminal
    finally:
        terminal.close()


AT_A_TERMINAL = [
    pytest.param("python train.py model=tiny_b", r"model=tiny_bert $", id="option"),
    pytest.param("python train.py precision.co", r"precision.compute=$", id="key"),
    pytest.param("eke pl", r"eke plan $", id="command"),
    pytest.param("A=1 python3 ./train.py seed=1 repe", r"repeat=$", id="behind an assignment"),
    pytest.param("python train.py --config-dir bi", r"--config-dir bin/$", id="folder"),
    pytest.param("python train.py data.path=ze", r"zebra\\ data.txt $", id="file with a space"),
    pytest.param("true; python train.py precision.tf32=of", r"tf32=off $", id="second command"),
    pytest.param("eke train -m precision=fp32,b", r"fp32,bf16$", id="one more value"),
    pytest.param("eke train train.steps=\t7", r"train.steps=7$", id="nothing to offer"),
    pytest.param("eke show optimizer.we", r"optimizer.weight_decay $", id="key of show"),
    pytest.param("eke train --help optimizer=mu", r"optimizer=muon $", id="topic of help"),
    pytest.param("eke status --js", r"--json $", id="flag of a command"),
    pytest.param("python oth", r"python other.py $", id="a script"),
    pytest.param("python other.py ze", r"zebra\\ data.txt $", id="another script"),
]
OF_A_SHELL = (
    "option", "key", "behind an assignment", "file with a space", "second command", "key of show",
    "another script",
)  # fmt: skip
"""What each shell has code of its own for."""


@needs_bash
@pytest.mark.parametrize(("typed", "wanted"), AT_A_TERMINAL)
def test_bash_completion(bash, place, typed, wanted) -> None:
    bash.type(typed + "\t")
    bash.wait_for(wanted)
    bash.type("\x15\n")  # away with the line
    bash.wait_for(READY)
    assert not (place / "it ran").exists()


@needs_bash
def test_bash_completion_prints_no_error(bash) -> None:
    bash.type("python train.py mod\t")
    bash.wait_for(r"model\.\s+model=\s")
    bash.type("\x15\n")
    bash.wait_for(READY)
    bash.type("eke train precison=x --config-dir=/no/where nonsense.\t")
    bash.type("\x15echo do''ne\n")
    shown = bash.wait_for(rf"[\s\S]*\ndone\s+{READY}")
    assert not re.search("Traceback|rror", shown)


@pytest.fixture(scope="module")
def zsh(place):
    terminal = Terminal([ZSH, "-f", "-i"], place, shell_environment(place))
    try:
        terminal.wait_for(READY)
        terminal.type("unset zle_bracketed_paste; autoload -Uz compinit; compinit -D -u\n")
        terminal.wait_for(rf"-D -u[\s\S]*{READY}$")
        terminal.type('eval "$(python train.py -sc install=zsh)"\n')
        terminal.wait_for(rf"\)\"[\s\S]*{READY}$")
        yield terminal
    finally:
        terminal.close()


@pytest.mark.slow
@needs_zsh
@pytest.mark.parametrize(("typed", "wanted"), [p for p in AT_A_TERMINAL if p.id in OF_A_SHELL])
def test_zsh_completion(zsh, place, typed, wanted) -> None:
    zsh.type(typed + "\t")
    zsh.wait_for(wanted)
    zsh.type("\x15\n")
    zsh.wait_for(READY)
    assert not (place / "it ran").exists()


@pytest.mark.slow
@needs_fish
@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        pytest.param("python train.py mod", ["model=", "model."], id="group"),
        pytest.param("python3 train.py model=tiny_b", ["model=tiny_bert"], id="option"),
        pytest.param("eke pl", ["plan"], id="command"),
        pytest.param("eke show optimizer.we", ["optimizer.weight_decay"], id="key of show"),
        pytest.param("A=1 eke train precision.tf32=o", ["on", "off"], id="enum"),
        pytest.param("eke train data.path=ze", ["zebra data.txt"], id="file with a space"),
        pytest.param("python other.py ze", ["zebra data.txt"], id="another script"),
    ],
)
def test_fish_completion(place, typed, wanted) -> None:
    code = f"eke -sc install=fish | source; complete -C {shlex.quote(typed)}"
    env = shell_environment(place)
    done = subprocess.run([FISH, "-c", code], env=env, cwd=place, capture_output=True, text=True)
    assert done.stderr == ""
    shown = [line.partition("\t")[0] for line in done.stdout.splitlines()]
    assert [re.sub(r"^.*=(?=.)", "", text) if "=" in typed else text for text in shown] == [
        re.sub(r"^.*=(?=.)", "", text) if "=" in typed else text for text in wanted
    ]
    assert not (place / "it ran").exists()
