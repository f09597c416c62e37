"""README's generated blocks are what the code says; `EKE_UPDATE=1 pytest ...` rewrites them."""

import os
import re

from support import REPO

from eke.config.compose import help_text
from eke.models.families import FAMILIES

README = REPO / "README.md"


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
    text = fresh = README.read_text()
    for name, make in BLOCKS.items():
        block = f"<!-- {name} -->\n{make()}\n<!-- /{name} -->"
        pattern = f"<!-- {name} -->.*?<!-- /{name} -->"
        fresh = re.sub(pattern, lambda _, block=block: block, fresh, flags=re.DOTALL)
    if os.environ.get("EKE_UPDATE"):
        README.write_text(fresh)
    else:
        assert fresh == text, "run EKE_UPDATE=1 pytest tests/conf/test_readme.py"


def test_the_map_names_what_is_there() -> None:
    block = README.read_text().split("## Map")[1].split("## ")[0]
    names = re.findall(r"^ {4}(?: {2})?(\S+?)/? {2,}\S", block, flags=re.MULTILINE)
    assert len(names) > 20
    for name in names:
        places = [REPO / name, REPO / "src" / "eke" / name]
        assert any(place.exists() for place in places), name


PAGES = [README, REPO / "CONTRIBUTING.md", *(REPO / "docs").rglob("*.md")]
HISTORY = REPO / "docs" / "lab.md"
"""Each entry names what was there on its day."""


def test_files_that_are_named_are_there() -> None:
    folders = "benchmarks|conf|containers|docs|results|slurm|src|sweeps|tests"
    for page in set(PAGES) - {HISTORY}:
        named = re.findall(rf"(?<![\w/])(?:{folders})/[a-z0-9_/]+\.[a-z]+", page.read_text())
        assert not [name for name in named if not (REPO / name).exists()], page.name


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_paths_in_contributing_exist() -> None:
    text = (REPO / "CONTRIBUTING.md").read_text()
    paths = re.findall(
        r"`((?:src|conf|tests|benchmarks|slurm|sweeps)/[\w./]+|[\w.]+\.(?:toml|txt))`", text
    )
    assert len(paths) > 30
    assert not [path for path in paths if not (REPO / path).exists()]
