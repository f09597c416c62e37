"""README, CONTRIBUTING and the pages of docs: commands, links, named files, generated blocks."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from reference.cards import TECHNIQUES
from reference.gpu import never_seen, read_gpus, speeds
from reference.links import anchors, links
from reference.seen import read_seen
from support import REPO

from eke.cli import main
from eke.config.compose import compose, help_text
from eke.config.compose.catalogue import make_catalogue
from eke.config.foreign_names import retired_names
from eke.estimate.memory import forecast
from eke.models.families import FAMILIES
from eke.plan.record import read_record
from eke.results.report.run_result import result_lines
from eke.workflows.auto_batch import BatchSearchBudget
from eke.workflows.planning import plan_for

README = REPO / "README.md"
COMMANDS = REPO / "docs" / "reference" / "command-line.md"
FORECAST = REPO / "docs" / "how-to" / "forecast.md"
INDEX = REPO / "docs" / "index.md"
FIRST = REPO / "docs" / "tutorial" / "first-run.md"
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


def ran() -> str:
    """The table of what ran where."""
    results = REPO / "results"
    options = make_catalogue().options
    named = [f"{group}={option}" for group in TECHNIQUES for option in options[group]]
    places = [(each.device, each.ran) for each in read_seen(results)]
    places += [(each.device, each.saw) for each in read_gpus(results)]
    lines = ["| where | ran |", "| --- | --- |"]
    for device, has_run in places:
        lines.append(f"| {device} | {sum(map(has_run, named))} of {len(named)} techniques |")
    lines.append("| SLURM | a cluster of one machine, in tests ([slurm](slurm/README.md)) |")
    listed = ", ".join(f"`{option}`" for option in never_seen(named, results))
    lines.append(f"| nowhere yet | {listed} |")
    return "\n".join([*lines, "", speeds(results)])


def picture() -> str:
    """The command and the verdict of the picture."""
    figures = json.loads((REPO / "results" / "readme_report.json").read_text())
    return (
        f"    python train.py {figures['command']}\n    eke report runs\n\n"
        f"on {figures['device']}: {figures['caption']}"
    )


def quick_plan() -> str:
    """The output of the first command of the page."""
    (command,) = re.findall(
        r"^    eke (plan --quick model=llama_1b .*)$", FORECAST.read_text(), re.M
    )
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(shlex.split(command)) == 0
    return f"```text\n{output.getvalue().rstrip()}\n```"


def first_output() -> str:
    results = REPO / "results"
    paths = {"folder": results, "record": results / "first_run.json", "plan": results / "plan.json"}
    record = read_record(SimpleNamespace(**paths))
    with tempfile.TemporaryDirectory() as here, contextlib.chdir(here):
        run = Path("runs") / record.run_id
        (run / "model").mkdir(parents=True)  # as the page's command leaves it
        lines = result_lines(record, run)
    return "\n".join(["```", *lines, "```"])


COMMANDS_WITH_HELP = (
    "plan", "fit", "data show", "report", "compare", "status", "logs", "cancel", "retry",
    "generate", "evaluate", "export", "sync", "schema", "doctor",
)  # fmt: skip


def helps() -> str:
    """What `eke COMMAND --help` prints, at 80 columns."""
    parts = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("COLUMNS", "80")
        for command in COMMANDS_WITH_HELP:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
                main([*command.split(), "--help"])
            parts.append(f"### eke {command}\n\n```text\n{printed.getvalue().strip()}\n```")
    return "\n\n".join(parts)


BLOCKS = {
    FIRST: {"output": first_output},
    COMMANDS: {
        "help": lambda: f"```\n{help_text().strip()}\n```",
        "tasks": tasks_table,
        "commands": helps,
    },
    README: {"ran": ran, "picture": picture},
    INDEX: {"report": picture},
    FORECAST: {"plan": quick_plan},
}


@pytest.mark.parametrize("page", BLOCKS, ids=lambda page: page.stem)
def test_generated_blocks_are_up_to_date(page: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no corrections from runs
    monkeypatch.setenv("COLUMNS", "80")
    text = fresh = page.read_text()
    for name, make in BLOCKS[page].items():
        block = f"<!-- {name} -->\n{make()}\n<!-- /{name} -->"
        pattern = f"<!-- {name} -->.*?<!-- /{name} -->"
        assert re.search(pattern, text, flags=re.DOTALL)
        fresh = re.sub(pattern, lambda _, block=block: block, fresh, flags=re.DOTALL)
    if os.environ.get("EKE_UPDATE"):
        page.write_text(fresh)
    else:
        assert fresh == text, "run EKE_UPDATE=1 pytest tests/conf/test_readme.py"


def test_readme_is_short() -> None:
    assert len(README.read_text().split()) <= 720  # 600 and a fifth


def test_commands_of_readme_and_first_run_compose() -> None:
    """Valid options and keys; a named file need not exist."""
    pages = README.read_text() + (REPO / "docs" / "tutorial" / "first-run.md").read_text()
    typed = re.findall(
        r"^ {4,6}(?:\S*python train\.py|eke plan|eke fit) (.*?)(?: {2,}#.*)?$", pages, re.M
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


def test_forecasts_of_several_gpus_are_up_to_date(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no corrections from runs
    page = (REPO / "docs" / "how-to" / "several-gpus.md").read_text()
    (common,) = re.findall(r"^    (precision=.*)$", page, re.M)
    (large,) = re.findall(r"`\$LLAMA_70B` is\n\n((?: {4}.*\n)+)", page)
    rows = re.findall(r"^\| .* \| `(.*)` \| ([\d.]+) \| (\d+) and (\d+) \|$", page, re.M)
    assert len(rows) == 6
    for typed, *shown in rows:
        words = f"{typed.replace('$LLAMA_70B', large)} {common} data=synthetic hardware=h100"
        plan = plan_for(compose(words.split()), planning=True, means=BatchSearchBudget(trace=False))
        memory = forecast(plan).peak
        found = [each / 2**30 for each in (memory.expected, memory.low, memory.high)]
        assert [*map(float, shown)] == pytest.approx(found, rel=0.06), typed
        assert float(shown[0]) == pytest.approx(found[0], rel=0.01), typed


def test_architecture_page_names_existing_code() -> None:
    text = ARCHITECTURE.read_text()
    paths = re.findall(r"`(src/eke/[\w/.]+)`", text)
    assert len(paths) > 25
    assert not [path for path in paths if not (REPO / path).exists()]
    stops = re.findall(r"`(src/eke/[\w/.]+\.py)`,\s+`(\w+)`", text)
    assert len(stops) >= 12
    for path, function in stops:
        assert re.search(rf"^(def|class) {function}\b", (REPO / path).read_text(), re.M), (
            path,
            function,
        )
    for section in text.split("\n## "):
        assert len(re.findall(r"^\d+\. ", section, re.M)) <= 12


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
LAB = REPO / "notes" / "lab"


def undated(page: Path) -> str:
    """A page without the dated entries of the lab, each of which names the files of its day."""
    text = page.read_text()
    return re.sub(r"^## 20\d\d-.*?(?=^## (?!20\d\d-)|\Z)", "", text, flags=re.M | re.S)


FOLDERS = "benchmarks|conf|containers|docs|results|slurm|src|sweeps|tests"
ROOTS = (REPO, REPO / "src" / "eke", REPO / "docs")
PACKAGES = "|".join(path.parent.name for path in (REPO / "src" / "eke").glob("*/__init__.py"))
DEFINED = frozenset(
    name
    for path in [*(REPO / "tests").rglob("*.py"), *(REPO / "benchmarks").rglob("*.py")]
    for name in (*re.findall(r"^ *def (test_\w+)", path.read_text(), re.M), path.stem)
)
"""Names of tests, and of files of Python."""


def gone(text: str) -> list[str]:
    """Tests, files and folders that a text names, and that do not exist."""
    files = re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[a-z0-9_/-]+\.[a-z]+\b", text)
    folders = re.findall(rf"`((?:{FOLDERS})(?:/[\w-]+)*/?)`", text)
    modules = re.findall(rf"`(eke\.(?:{PACKAGES})(?:\.[a-z_]+)*)(?:\.[A-Z]\w*)?`", text)
    paths = [name.replace(".", "/") for name in modules]
    places = [*files, *folders]
    found = [name for name in places if not any((root / name).exists() for root in ROOTS)]
    found += [p for p in paths if not is_python(p)]
    known = DEFINED | retired_names().keys()  # `test_size` is a name of other tools
    return found + [name for name in re.findall(r"\b(test_\w+)\b", text) if name not in known]


def is_python(path: str) -> bool:
    """Whether `eke/config/compose` is a package, a module or a name in one."""
    place = REPO / "src" / path
    here = place.is_dir() or place.with_suffix(".py").is_file()
    above = place.parent if place.parent.is_dir() else place.parent.with_suffix(".py")
    file = above / "__init__.py" if above.is_dir() else above
    return here or (
        file.is_file() and re.search(rf"\b{place.name}\b", file.read_text()) is not None
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_page_names_existing_files_and_keys(page: Path) -> None:
    text = undated(page) if LAB in page.parents else page.read_text()
    assert not gone(text)


@pytest.mark.parametrize(
    "text",
    [
        "[the page](docs" + "/forecast.md)",
        "by `tests/unit/gone.py`",
        "`test_that_is_not_there` shows it",
        "in `src/eke/nowhere`",
        "`eke.config.nowhere` does it",
        "## 2026-01-01: an entry\n`results/old.json`\n## Rules\n`results/none.json`",
    ],
)
def test_removed_name_on_a_page_is_detected(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert len(gone(undated(page))) == 1


# ------------------------------------------------------------- what is said not to be measured

UNSEEN = re.compile(r"\b(?:never|not)\b(?: (?:yet|been))* (?:seen|tried)\b", re.I)
UNMEASURED = re.compile(
    r"\bGPUs?\b(?: today)?[^\n.]{0,20}\bnot yet measured|"
    r"\bno\w* [^.]*\bwas measured on (?:a|any) GPU|"
    r"\bGPUs? (?:is|was|were|has been|have been) (?:not yet|never) (?:measured|seen)|"
    r"\bnever (?:been )?seen running on (?:one|a GPU)",
    re.I,
)


def contradicted(text: str) -> list[str]:
    """Sentences that deny of a GPU or an option what a committed record shows.

    A short one, *Never seen running*, is about the option of its heading, or the sentence before.
    """
    gpus = read_gpus(REPO / "results")
    options = make_catalogue().options
    seen = {
        option
        for group in TECHNIQUES
        for option in options[group]
        if any(each.saw(f"{group}={option}") for each in gpus)
    }
    known = {option for group in TECHNIQUES for option in options[group]}
    found, before = [], ""
    for sentence in re.split(r"(?<=[.;])\s|\\\n|\n(?=[|#-])|\n\n", text):
        if heading := re.match(r"### \w+=(\w+)", sentence):
            before = heading[1]
            continue
        about = sentence if len(sentence.split()) > 4 else f"{before} {sentence}"
        words = set(re.findall(r"\w+", about.replace("CUDA graphs", "cudagraphs").lower()))
        named = UNSEEN.search(sentence) and not words.isdisjoint(seen)
        before = before if before in known else sentence
        if named or UNMEASURED.search(" ".join(sentence.split())):
            found.append(" ".join(sentence.split()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_page_does_not_contradict_gpu_records(page: Path) -> None:
    assert read_gpus(REPO / "results"), "records of a GPU are committed"
    text = undated(page) if LAB in page.parents else page.read_text()
    assert not contradicted(text)


@pytest.mark.parametrize(
    "text",
    [
        "No number here was measured on a GPU.",
        "Options (`flash2`, `flex`, CUDA graphs) have never been seen running.",
        "Replay kernels as CUDA graphs. *Never seen running.*",
        "### compile=cudagraphs\n\nReplay the kernels of a step. *Never seen running.*",
        "| GPUs today | not yet measured | not yet measured |",
        "- GPUs: not yet measured",
        "It is called cudagraphs now; `cudagraphs` was not seen running.",
        "*Status: chosen by formulas, never seen running on one.*",
        "Reserved memory on today's GPUs is not yet measured.",
    ],
)
def test_contradiction_with_a_record_is_detected(text: str) -> None:
    assert contradicted(text)


def test_links_point_to_existing_headings() -> None:
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
