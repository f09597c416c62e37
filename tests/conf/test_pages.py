"""All pages of the site: words, readers, commands."""

import re
import shlex

import pytest
from reference.budgets import BUDGETS, TOLERANCE, budget_of, words
from support import REPO

from eke.cli import _NAMES
from eke.common.errors import EkeError
from eke.config.compose import compose
from eke.config.compose.command_line import split_arguments

DOCS = REPO / "docs"
PAGES = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}


@pytest.mark.parametrize("name", [each for each in BUDGETS if (DOCS / each).exists()])
def test_page_or_folder_keeps_its_budget(name: str) -> None:
    found = sum(words(path) for page, path in PAGES.items() if budget_of(page) == name)
    assert 0 < found <= TOLERANCE * BUDGETS[name]


def test_every_page_has_a_budget() -> None:
    assert not [name for name in PAGES if budget_of(name) is None]


def test_code_and_front_matter_do_not_count(tmp_path) -> None:
    page = tmp_path / "page.md"
    code = "```\nno no\n```\n\n    no\n\n"
    page.write_text(f"---\na: b\n---\n# One two\n\n{code}| three | [four](no.md) |\n")
    assert words(page) == 4


@pytest.mark.parametrize("name", PAGES)
def test_page_says_whom_it_serves(name: str) -> None:
    after_title = PAGES[name].read_text().partition("\n\n")[2].partition("\n\n")[0]
    assert re.fullmatch(r"\*[^*]+\*", after_title), after_title[:60]


def commands(text: str) -> list[str]:
    """Commands of `python train.py` and `eke` in code blocks, without comments."""
    fenced = re.findall(r"^```(?:bash|console|sh)\n(.*?)^```", text, re.M | re.S)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    indented = "\n".join(re.findall(r"^(?: {4}|\t)(.*\S.*)$", rest, re.M))
    lines = "\n".join([*fenced, indented]).replace("\\\n", " ").splitlines()
    found = [re.sub(r"\s+#.*$", "", line.strip().removeprefix("$ ")) for line in lines]
    return [line for line in found if re.match(r"(\S*python3? train\.py|eke)\s", line)]


COMMANDS = sorted(
    {(name, line) for name, path in PAGES.items() for line in commands(path.read_text())}
)
_NO_OVERRIDES = {
    "report", "compare", "status", "logs", "cancel", "retry", "sync", "schema", "doctor",
    "export", "generate", "evaluate", "data", "show",
}  # fmt: skip


def problem_with(line: str) -> str:
    """Why a command cannot be typed, empty if it can. Files that it names need not exist."""
    typed = shlex.split(re.split(r"\s[|<>]|\s&&|\s\|\|", line)[0])
    typed = typed[2:] if typed[0] != "eke" else typed[1:]
    command = "train"
    if line.startswith("eke"):
        command = typed.pop(0) if typed else "--help"
        if command not in (*_NAMES, "--help", "--version"):
            return f"no command {command}"
    if command in _NO_OVERRIDES or command.startswith("--") or "-sc" in typed:
        return ""
    if command == "fit":
        return ""  # its flags take values
    flags = {"--json", "--why", "--quick", "--verbose", "-v", "-q"}
    typed = [word for word in typed if word not in flags and word != "hardware=all"]
    try:
        asked = split_arguments([word for word in typed if "..." not in word])
        known = [  # experiments of a reader's own folder do not exist here
            word
            for word in asked.overrides
            if not (asked.config_dir and word.startswith("experiment="))
            and not word.startswith("hydra/launcher=")
        ]
        if asked.help is None and not asked.multirun:
            compose(known)
    except EkeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{p}: {c}" for p, c in COMMANDS])
def test_command_of_a_page_can_be_typed(page: str, line: str) -> None:
    assert not problem_with(line)


@pytest.mark.parametrize(
    "line",
    [
        "python train.py precison=bf16",
        "python train.py optimizer.lr=fast",
        "eke raport runs",
        "eke plan model=llama_2b",
    ],
)
def test_wrong_command_on_a_page_is_detected(line: str, tmp_path) -> None:
    for text in (f"```bash\n{line}   # a comment\n```\n", f"text\n\n    {line}\n"):
        (found,) = commands(text)
        assert problem_with(found)
