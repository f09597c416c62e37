"""docs/tutorial/afternoon.md, typed as it stands there, on files made here."""

import json
import random
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import save_checkpoint
from live import Live, record_of, rows_of
from support import REPO, Finished, environment
from unit.results.trackers.stub import serving

TUTORIAL = (REPO / "docs" / "tutorial" / "afternoon.md").read_text()


def commands(section: str) -> list[str]:
    """The indented lines of a section."""
    body = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", TUTORIAL, re.M | re.S)
    assert body, section
    return [line.strip() for line in body[1].splitlines() if line.startswith("    ")]


def fenced(language: str) -> str:
    """The one block of this language."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", TUTORIAL, re.M | re.S)
    return str(block)


@pytest.fixture
def afternoon(tmp_path: Path) -> Path:
    """The user's folder: a checkpoint with its tokenizer, and questions with answers."""
    save_checkpoint(tmp_path / "my_model", "llama", tokenizer=True)
    chance = random.Random(0)
    with open(tmp_path / "my_data.jsonl", "w") as file:
        for _ in range(200):
            a, b = chance.randint(0, 9), chance.randint(0, 9)
            row = {"question": f"what is {a} plus {b}", "answer": f"it is {a + b}"}
            file.write(json.dumps(row) + "\n")
    option = tmp_path / "my_conf" / "experiment" / "answers.yaml"
    option.parent.mkdir(parents=True)
    option.write_text(fenced("yaml"))
    return tmp_path


def typed(folder: Path, command: str, **variables: str) -> Finished:
    """One line of the tutorial, in a shell."""
    programs = f'python() {{ {shlex.quote(sys.executable)} "$@"; }}; '
    programs += 'eke() { python -m eke.cli "$@"; }; '
    line = command.replace("train.py", str(REPO / "train.py"))
    done = subprocess.run(
        ["bash", "-c", programs + line],
        cwd=folder,
        env={**environment(folder), **variables},
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
def test_the_afternoon(afternoon: Path) -> None:
    (plan,) = commands("Look before you run")
    looked = typed(afternoon, plan)
    assert looked.code == 0, looked.text
    assert "of 200 read; 0 bad, 0 empty" in looked.out
    assert "data.tokenizer" in looked.out
    assert not (afternoon / "runs").exists()

    first, *watching = commands("Train, on two processes")
    words = shlex.split(first)[2:]
    live = Live(afternoon, tuple(words))
    live.wait_for_step(5)
    for command in watching:
        seen = typed(afternoon, command)
        assert seen.code == 0, seen.text
        assert seen.out.strip()
    live.signal(signal.SIGINT)  # Ctrl-C
    said = live.finish()
    assert live.process.returncode == 75, said

    (again,) = commands("Interrupt it")
    assert again == first
    finished = typed(afternoon, again)
    assert finished.code == 0, finished.text
    (folder,) = (p.parent for p in (afternoon / "runs").glob("*/record.json"))
    record = record_of(folder)
    assert (record["outcome"], record["attempt"]) == ("ok", 1)
    assert record["plan"]["batch"]["world_size"] == 2
    assert record["loss"]["eval_final"] < record["loss"]["eval_start"]
    assert "answered from" in typed(afternoon, again).out

    (afternoon / "use.py").write_text(fenced("python"))
    used = typed(afternoon, "python use.py")
    assert used.code == 0, used.text
    assert used.out.startswith("what is 4 plus 5"), used.out

    (compared,) = commands("Compare two techniques")
    sweep = typed(afternoon, compared)
    assert sweep.code == 0, sweep.text
    assert sweep.out.count("] ok in ") == 2

    (sync,) = commands("Show it to others")
    sync_all(afternoon, sync, folder)


def sync_all(afternoon: Path, command: str, folder: Path) -> None:
    """Three runs reach a server on this machine; a second time there is nothing to send."""
    with serving() as server:
        account = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "0" * 40}
        synced = typed(afternoon, command, **account)
        assert synced.code == 0, synced.text
        assert len(list((afternoon / "runs").glob("*/sync.json"))) == 3
        steps = {row["train/global_step"] for row in rows_of(folder)}
        assert len(steps) == record_of(folder)["plan"]["steps"]["total"] + 1
        sent = [path for path in server.requests if "file_stream" in path]
        assert sent
        assert typed(afternoon, command, **account).code == 0
        assert [path for path in server.requests if "file_stream" in path] == sent, "sent twice"


def test_every_command_is_typed_somewhere() -> None:
    """A command that is added to the page without a place in the test fails here."""
    lines = [line for line in TUTORIAL.splitlines() if line.startswith("    ")]
    inside = "".join(re.findall(r"```.*?```", TUTORIAL, re.S))
    outside = [line for line in lines if line not in inside]
    assert len(outside) == 7, outside
