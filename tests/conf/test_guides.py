"""Troubleshooting, AGENTS.md and the skill: messages exist, and commands run."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest
import yaml
from support import REPO
from unit.results.report.made import Run, compared

from eke.cli import main
from eke.results.report.show.file_formats import as_plain

AGENTS, SKILL = REPO / "AGENTS.md", REPO / "skills" / "eke" / "SKILL.md"
TROUBLE = REPO / "docs" / "troubleshooting.md"
SOURCE = "".join(path.read_text() for path in (REPO / "src").rglob("*.py"))


def _typed(page: Path) -> list[str]:
    """Indented commands of a page."""
    return re.findall(r"^ {4,}(eke .*)$", page.read_text(), re.M)


def test_message_of_troubleshooting_is_in_source() -> None:
    sections = TROUBLE.read_text().split("\n## ")[1:]
    quoted = re.findall(r"^> (.*)$", TROUBLE.read_text(), re.M)
    messages = [part for line in quoted for part in re.findall(r"`([^`]+)`", line)]
    assert len(sections) >= 15
    assert len(messages) >= 14
    assert not [message for message in messages if message not in SOURCE]
    assert not [each for each in sections if "`" not in each]  # a command or a key


def test_skill_has_front_matter_and_known_commands() -> None:
    _, front, _ = SKILL.read_text().split("---\n", 2)
    fields = yaml.safe_load(front)
    assert set(fields) == {"name", "description"}
    assert fields["name"] == SKILL.parent.name
    assert len(fields["description"]) <= 1024  # limit of the format
    assert set(_typed(SKILL)) <= set(_typed(AGENTS)) | {"eke plan --json --quick experiment=smoke"}


def test_problems_of_agents_page_have_its_keys(capsys) -> None:
    assert main(["plan", "--json", "--quick", "train.steps=0"]) == 2
    shown = re.search(r"^\{\"problems\".*$", AGENTS.read_text(), re.M)
    assert shown
    printed, expected = (
        yaml.safe_load(text)["problems"][0] for text in (capsys.readouterr().out, shown[0])
    )
    assert set(printed) == set(expected)
    assert printed["overrides"] == expected["overrides"]


def test_claims_of_agents_page_have_its_keys(tmp_path) -> None:
    runs = [
        Run({"precision": precision}, speed=speed, repeat=repeat)
        for repeat in range(3)
        for precision, speed in (("fp32", 10), ("bf16", 20))
    ]
    claim = as_plain(compared(tmp_path, runs))["claims"][0]
    named = re.search(r"has `claims`: (.*?)\. A value", AGENTS.read_text(), re.S)
    assert named
    assert set(re.findall(r"`(\w+)`", named[1])) <= {*claim, *claim["rows"][0]}


@pytest.mark.slow
def test_commands_of_agents_page_run(tmp_path) -> None:
    commands = _typed(AGENTS)
    assert len(commands) == 7
    environment = os.environ | {"PYTHONPATH": str(REPO / "src"), "XDG_CACHE_HOME": str(tmp_path)}
    for command in commands:
        words = [sys.executable, "-m", *shlex.split(command)]
        ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, f"{command}: {ran.stderr}"
    assert (tmp_path / "runs" / "report.json").is_file()


@pytest.mark.slow
def test_wheel_works_outside_checkout(tmp_path) -> None:
    """Built and unpacked: options, pages and `eke plan` are there without the repository."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    built = [*pip, "wheel", "-q", "--no-deps", "-w", str(tmp_path / "dist"), str(REPO)]
    subprocess.run(built, check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    place = tmp_path / "place"
    subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--target", str(place), str(wheel)], check=True
    )
    named = set(re.findall(r"docs/[\w/-]+\.md", SOURCE))
    assert named
    assert not [page for page in named if not (place / "eke" / page).is_file()]
    environment = os.environ | {"PYTHONPATH": str(place), "XDG_CACHE_HOME": str(tmp_path)}
    for words in (
        ["-m", "eke", "plan", "--quick", "experiment=smoke"],
        ["-c", "import eke; print(eke.__file__)"],
    ):
        ran = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(str(place))


def test_picture_of_readme_is_drawn_from_its_figures() -> None:
    script = run_path(str(REPO / "tools" / "report_picture.py"))
    figures = json.loads((REPO / "results" / "readme_report.json").read_text())
    drawn = script["draw"](figures)
    assert (REPO / "docs" / "assets" / "report.svg").read_text() == drawn
    assert min(row["memory"] for row in figures["rows"]) < 0.5, "an effect to look at"
