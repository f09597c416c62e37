"""README, CONTRIBUTING and the pages of docs: commands, links, named files, generated blocks."""

import os
import re
import shlex
import subprocess
from pathlib import Path

from reference.links import anchors, links
from support import REPO

from eke.config.compose import compose, help_text
from eke.models.families import FAMILIES

README = REPO / "README.md"
COMMANDS = REPO / "docs" / "reference" / "command-line.md"
ARCHITECTURE = REPO / "docs" / "architecture.md"


def tasks_table() -> str:
    tasks = sorted({task for each in FAMILIES.values() for task in each.tasks})
    lines = ["| family | " + " | ".join(tasks) + " |", "| --- |" + " --- |" * len(tasks)]
    for name, family in FAMILIES.items():
        if not family.is_known:
            continue  # a checkpoint's, of which transformers knows
        cells = ("x" if task in family.tasks else "" for task in tasks)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


BLOCKS = {"help": lambda: f"```\n{help_text().strip()}\n```", "tasks": tasks_table}


def test_generated_blocks_are_up_to_date() -> None:
    text = fresh = COMMANDS.read_text()
    for name, make in BLOCKS.items():
        block = f"<!-- {name} -->\n{make()}\n<!-- /{name} -->"
        pattern = f"<!-- {name} -->.*?<!-- /{name} -->"
        assert re.search(pattern, text, flags=re.DOTALL)
        fresh = re.sub(pattern, lambda _, block=block: block, fresh, flags=re.DOTALL)
    if os.environ.get("EKE_UPDATE"):
        COMMANDS.write_text(fresh)
    else:
        assert fresh == text, "run EKE_UPDATE=1 pytest tests/conf/test_readme.py"


def test_readme_is_short() -> None:
    assert len(README.read_text().split()) <= 750


def test_commands_of_readme_and_first_run_compose() -> None:
    """Valid options and keys; a named file need not exist."""
    pages = README.read_text() + (REPO / "docs" / "tutorial" / "first-run.md").read_text()
    typed = re.findall(
        r"^ {4}(?:\S*python train\.py|eke plan|eke fit) (.*?)(?: {2,}#.*)?$", pages, re.M
    )
    assert len(typed) >= 8
    for command in typed:
        words = shlex.split(command)
        sweep = "-m" in words
        for word in words:
            if "=" in word and not (sweep and word.startswith(("sweep", "hydra/"))):
                key, _, values = word.partition("=")
                options = [f"{key}={value}" for value in values.split(",")] if sweep else [word]
                for option in options:
                    others = [w for w in words if "=" in w and w != word and not sweep]
                    compose([*others, option])


def test_architecture_names_what_exists() -> None:
    text = ARCHITECTURE.read_text()
    paths = re.findall(r"`(src/eke/[\w/.]+)`", text)
    assert len(paths) > 25
    assert not [path for path in paths if not (REPO / path).exists()]
    stops = re.findall(r"`(src/eke/[\w/.]+\.py)`,\s+`(\w+)`", text)
    assert len(stops) >= 12
    for path, function in stops:
        assert re.search(rf"^def {function}\(", (REPO / path).read_text(), re.M), (path, function)
    assert len(re.findall(r"^\d+\. ", text, re.M)) <= 12


def test_architecture_has_a_paragraph_for_each_package() -> None:
    described = re.findall(r"^\*\*(\w+)\.\*\* ", ARCHITECTURE.read_text(), re.M)
    packages = {path.parent.name for path in (REPO / "src" / "eke").glob("*/__init__.py")}
    assert sorted(described) == sorted(packages)


def pages() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=REPO, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [path for name in listed.stdout.splitlines() if (path := REPO / name).exists()]


PAGES = pages()
HISTORY = REPO / "docs" / "lab"
"""Each entry names the files of its day."""


def test_files_that_are_named_exist() -> None:
    folders = "benchmarks|conf|containers|docs|results|slurm|src|sweeps|tests"
    for page in PAGES:
        if HISTORY in page.parents or page.name == "CHANGELOG.md":
            continue
        named = re.findall(rf"(?<![\w/])(?:{folders})/[a-z0-9_/-]+\.[a-z]+", page.read_text())
        roots = (REPO, REPO / "src" / "eke")
        gone = [name for name in named if not any((root / name).exists() for root in roots)]
        assert not gone, page.name


def test_links_lead_to_a_page_and_its_heading() -> None:
    assert len(PAGES) > 50
    for page in PAGES:
        for link in links(page):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_pages_named_in_source_exist() -> None:
    """Comments, help texts, sources of rules and option files name pages of docs."""
    files = [
        path
        for folder in ("src", "conf", "tests", "benchmarks", "sweeps", "slurm", "containers")
        for path in (REPO / folder).rglob("*")
        if path.suffix in {".py", ".yaml", ".md", ".sh", ".sbatch", ".def"}
    ]
    named = {
        (path.name, page)
        for path in files
        for page in re.findall(r"(?<![\w./-])docs/[\w/-]+\.md", path.read_text())
    }
    assert len(named) > 20
    assert not [(name, page) for name, page in named if not (REPO / page).exists()]


def test_paths_in_contributing_exist() -> None:
    text = (REPO / "CONTRIBUTING.md").read_text()
    paths = re.findall(
        r"`((?:src|conf|tests|benchmarks|slurm|sweeps)/[\w./]+|[\w.]+\.(?:toml|txt))`", text
    )
    assert len(paths) > 30
    assert not [path for path in paths if not (REPO / path).exists()]
