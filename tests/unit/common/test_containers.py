"""Container definitions, as far as they can be read: nothing here can build them."""

import re
import shlex
import tomllib

import pytest
from support import REPO

FOLDER = REPO / "containers"
INSTRUCTIONS = {"FROM", "SHELL", "WORKDIR", "COPY", "RUN", "CMD", "ENV"}
SECTIONS = {"files", "post", "runscript", "test", "environment"}


def instructions() -> list[tuple[str, str]]:
    """Instruction and argument of each line of the Dockerfile, continuations joined."""
    text = (FOLDER / "Dockerfile").read_text()
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def definition() -> tuple[dict[str, str], dict[str, str]]:
    """Header and sections of the Apptainer definition."""
    head, *parts = re.split(r"^%", (FOLDER / "eke.def").read_text(), flags=re.MULTILINE)
    header = dict(re.findall(r"^(\w+): (\S+)$", head, flags=re.MULTILINE))
    return header, {part.split("\n", 1)[0].strip(): part.split("\n", 1)[1] for part in parts}


def test_container_files_use_only_known_instructions() -> None:
    assert {name for name, _ in instructions()} <= INSTRUCTIONS
    assert instructions()[0][0] == "FROM"
    header, sections = definition()
    assert header["Bootstrap"] == "docker"
    assert set(sections) <= SECTIONS


def test_containers_start_from_the_same_pinned_image() -> None:
    (image,) = [argument for name, argument in instructions() if name == "FROM"]
    assert definition()[0]["From"] == image
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d{2}\.\d{2}-py3", image)


def commands(text: str) -> list[list[str]]:
    """Words of each command of a shell script; quotes and continuations must close."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [part for line in joined.splitlines() for part in line.split("&&")]
    return [shlex.split(line) for line in lines if line.strip()]


def test_containers_run_the_same_commands() -> None:
    (run,) = [argument for name, argument in instructions() if name == "RUN"]
    post = [words for words in commands(definition()[1]["post"]) if words[0] not in ("set", "cd")]
    assert commands(run) == post


def test_containers_pin_and_check_torch() -> None:
    (run,) = [argument for name, argument in instructions() if name == "RUN"]
    installs = [words for words in commands(run) if words[:2] == ["pip", "install"]]
    assert len(installs) == 1
    constraint = installs[0][installs[0].index("--constraint") + 1]
    assert run.count(constraint) == 3, "written, given to pip, compared"
    assert "constraints.txt" not in run


@pytest.mark.parametrize("kind", ["Dockerfile", "eke.def"])
def test_container_copies_all_required_files(kind) -> None:
    if kind == "Dockerfile":
        copied = [w for name, words in instructions() if name == "COPY" for w in words.split()[:-1]]
    else:
        copied = [line.split()[0] for line in definition()[1]["files"].splitlines() if line.strip()]
    assert all((REPO / name).exists() for name in copied)
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    needed = {"pyproject.toml", "hatch_build.py", project["project"]["readme"], "src"}
    links = [path for path in (REPO / "conf").iterdir() if path.is_symlink()]
    needed |= {path.resolve().relative_to(REPO).parts[0] for path in links}
    needed |= set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"])
    assert needed <= set(copied)


def test_installed_extra_exists() -> None:
    (run,) = [argument for name, argument in instructions() if name == "RUN"]
    extras = re.search(r"\.\[([\w,]+)\]", run)
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    assert set(extras[1].split(",")) <= set(project["project"]["optional-dependencies"])
