"""The guides' claims with eke's verdicts: reads and checks notes/claims/*.yaml."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from support import REPO

FOLDER = REPO / "notes" / "claims"

KINDS = ("technique", "number", "table", "advice")
VERDICTS = {
    "reproduced": "a record or a test of this repository shows it",
    "predicted": "a trace of the same step, on tensors without data, gives the number",
    "holds": "it follows from a definition or from arithmetic, which a test or the reason repeats",
    "partly": "true of a part; the reason says of which",
    "outdated": "was true of its libraries; today's do otherwise",
    "false": "the evidence says otherwise",
    "not measured": "needs what was not at hand (a GPU, above all); nothing is claimed",
}
"""Every verdict there is -> what it means."""
MAX_WORDS = 25
"""Of a quotation."""


@dataclass(frozen=True)
class Evidence:
    """One thing that a verdict rests on: exactly one of record, test and source is set."""

    record: str = ""
    """`results/FILE.json#/path/to/number`; in a list, `key=value` chooses the element."""
    over: str = ""
    """Another number of the same form, beside which the first is shown."""
    label: str = ""
    unit: str = ""
    """A key of `reference.claims_evidence.UNITS`."""
    test: str = ""
    """`tests/FILE.py::NAME`."""
    source: str = ""
    """An https address."""


@dataclass(frozen=True)
class Claim:
    """What guides say, and what is to be thought of it."""

    id: str
    says: str
    guides: list[str]
    kind: str
    verdict: str
    why: str
    evidence: list[Evidence] = field(default_factory=list)
    measure: str = ""
    """The command that would measure it."""
    seen: list[str] = field(default_factory=list)
    """`group=option` that the claim is about: the page says where the records saw it running."""


@dataclass(frozen=True)
class Section:
    """Claims about one matter: a file."""

    key: str
    title: str
    claims: list[Claim]
    about: str = ""


@dataclass(frozen=True)
class Guide:
    """One of the five texts."""

    key: str
    title: str
    edition: str
    url: str
    headings: dict[str, str]
    """Every heading of the text -> the section here that has its claims."""


@dataclass(frozen=True)
class Answer:
    """One row of the guides' tables of what a technique improves."""

    technique: str
    answers: dict[str, list[str]]
    """Guide -> its words for speed and for memory, as it has them."""
    option: str = ""
    """The option of benchmarks/techniques.py's records; empty where they have none."""
    against: str = "precision=fp32"
    """The option it is compared with: by default the plain run."""
    rows: list[str] = field(default_factory=list)
    """The guides' measured row with it, and the one without (`reference.published.ROWS`)."""
    note: str = ""


def read_guides() -> list[Guide]:
    """The five texts, in the order in which they are cited."""
    return [Guide(**each) for each in _load("guides.yaml")["guides"]]


def read_answers() -> list[Answer]:
    """The rows of the guides' yes/no tables."""
    return [Answer(**each) for each in _load("answers.yaml")["answers"]]


def read_sections() -> list[Section]:
    """All claims, section by section, in the order of `guides.yaml`."""
    return [_section(key, _load(f"{key}.yaml")) for key in _load("guides.yaml")["sections"]]


def _section(key: str, content: dict[str, Any]) -> Section:
    claims = [
        Claim(**{**each, "evidence": [Evidence(**e) for e in each.get("evidence", [])]})
        for each in content["claims"]
    ]
    return Section(key, content["title"], claims, content.get("about", ""))


def _load(name: str) -> dict[str, Any]:
    return yaml.safe_load(Path(FOLDER / name).read_text())
