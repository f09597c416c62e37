"""notes/claims.md matches its data and the records; every claim has evidence."""

import json
import os
import re

import pytest
from reference.claims import (
    FOLDER,
    KINDS,
    MAX_WORDS,
    VERDICTS,
    Answer,
    Evidence,
    read_answers,
    read_guides,
    read_sections,
)
from reference.claims_evidence import UNITS, is_a_test, number_at, provenance, shown
from reference.claims_page import claims_page
from reference.claims_tables import answers_table, compare
from reference.published import ROWS
from support import REPO

from eke.config.compose.catalogue import make_catalogue
from eke.config.compose.compose_cache import make_trees
from eke.config.compose.composer import compose_cells

GUIDES = {guide.key: guide for guide in read_guides()}
SECTIONS = read_sections()
CLAIMS = [claim for section in SECTIONS for claim in section.claims]
EVIDENCE = [(claim.id, each) for claim in CLAIMS for each in claim.evidence]
ids = [claim.id for claim in CLAIMS]


def test_page_is_up_to_date() -> None:
    page, fresh = REPO / "notes" / "claims.md", claims_page(REPO / "results")
    if os.environ.get("EKE_UPDATE"):
        page.write_text(fresh)
    else:
        assert fresh == page.read_text(), "run EKE_UPDATE=1 pytest tests/conf/test_claims.py"


def test_every_file_is_a_section_and_claims_are_unique() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} - {"guides", "answers"} == {
        section.key for section in SECTIONS
    }
    assert len(set(ids)) == len(ids)


def test_every_heading_of_the_guides_has_its_claims() -> None:
    said = {(key, section.key) for section in SECTIONS for c in section.claims for key in c.guides}
    asked = {(guide.key, key) for guide in GUIDES.values() for key in guide.headings.values()}
    assert not asked - said
    assert {section.key for section in SECTIONS} == {key for _, key in asked}


@pytest.mark.parametrize("claim", CLAIMS, ids=ids)
def test_claim_is_complete(claim) -> None:
    assert claim.kind in KINDS
    assert claim.verdict in VERDICTS
    assert claim.guides
    assert set(claim.guides) <= set(GUIDES)
    assert claim.why.endswith(".")
    assert all(len(quote.split()) <= MAX_WORDS for quote in re.findall(r'"([^"]*)"', claim.says))
    if claim.verdict != "not measured":
        assert claim.evidence, "a verdict rests on something"
    if claim.verdict in ("reproduced", "predicted"):
        assert any(each.record or each.test for each in claim.evidence)


def test_evidence_exists() -> None:
    for claim, each in EVIDENCE:
        assert sum(map(bool, (each.record, each.test, each.source))) == 1, claim
        if each.record:
            assert each.label, claim
            assert each.unit in UNITS, claim
            assert shown(each), claim
            made = provenance(each.record.partition("#")[0])
            assert made.machine, claim
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", made.date), claim
        assert not each.test or is_a_test(each.test), f"{claim}: {each.test}"
        assert not each.source or each.source.startswith("https://"), claim


COMMANDS = [claim for claim in CLAIMS if claim.measure]


@pytest.mark.parametrize("claim", COMMANDS, ids=[claim.id for claim in COMMANDS])
def test_measuring_command_of_a_claim_is_valid(claim) -> None:
    program, script, *typed = claim.measure.split()
    assert program == "python"
    assert (REPO / script).is_file()
    sweeps = [word.removeprefix("sweep=") for word in typed if word.startswith("sweep=")]
    assert all((REPO / "sweeps" / f"{name}.yaml").is_file() for name in sweeps)
    if script == "train.py" and not sweeps:
        pairs = [word.partition("=") for word in typed if word != "-m"]
        cell = tuple(f"{key}={values.split(',')[-1]}" for key, _, values in pairs)
        compose_cells([cell], make_trees(make_catalogue()))


def test_guides_are_named_by_https() -> None:
    assert all(guide.url.startswith("https://") for guide in GUIDES.values())


def test_guide_rows_refer_to_existing_techniques() -> None:
    rows = {row.technique for row in ROWS}
    for answer in read_answers():
        assert set(answer.answers) <= set(GUIDES)
        assert set(answer.rows) <= rows
        assert len(answer.rows) in (0, 2)


@pytest.mark.parametrize(
    ("pointer", "why"),
    [
        ("results/none.json#/a", "no committed record"),
        ("pyproject.toml#/a", "no committed record"),
        ("results/guide_memory.json#/rows/row=unknown/error_frac", "no 'row=unknown'"),
        ("results/guide_memory.json#/rows/99", "no '99'"),
        ("results/guide_memory.json#/setting", "is no number"),
        ("results/guide_memory.json#/environment/git/dirty", "is no number"),
    ],
)
def test_dangling_pointer_is_an_error(pointer, why) -> None:
    with pytest.raises(KeyError, match=re.escape(why)):
        number_at(pointer)


def test_number_is_shown_with_its_baseline() -> None:
    row = "results/guide_memory.json#/rows/row={}/measured_mib"
    evidence = Evidence(row.format("fp16"), row.format("none"), label="fp16", unit="MB")
    assert shown(evidence) == "fp16 13939 MB against 14949 MB"


@pytest.mark.parametrize(
    "name",
    [
        "tests/conf/test_claims.py::test_that_is_not_there",
        "tests/conf/test_claims.py::compose",
        "tests/conf/missing.py::test_x",
        "src/eke/common/units.py::test_x",
    ],
)
def test_unknown_test_name_is_not_evidence(name) -> None:
    assert not is_a_test(name)


@pytest.mark.parametrize(
    ("mine", "word"),
    [(90, "yes"), (100.4, "no, the same"), (99.6, "no, the same"), (110, "no, more")],
)
def test_directions_of_claims(mine, word) -> None:
    assert compare(mine, 100) == word


def test_gpu_record_supports_speed_claims(tmp_path) -> None:
    def measured(speed: float, shared: bool = False) -> dict:
        return {"outcome": "ok", "samples_per_s": speed, "shared_device": shared}

    rows = {"fp16": measured(20), "none": measured(10), "Adafactor": measured(9, shared=True)}
    content = {"size": "full", "device": "H200", "parts": {"memory": rows}}
    (tmp_path / "on_gpu_h200.json").write_text(json.dumps(content))
    (tmp_path / "guide_memory.json").write_text((REPO / "results/guide_memory.json").read_text())
    answers = [
        Answer("fp16", {"gpu": ["yes", "depends"]}, rows=["fp16", "none"]),
        Answer("Adafactor", {"gpu": ["yes", "yes"]}, rows=["Adafactor", "none"]),
    ]
    table = answers_table(answers, list(GUIDES.values()), tmp_path)
    first, second = table.splitlines()[-2:]
    assert "| H200: yes, 20.00/s against 10.00/s |" in first
    assert "predicted: yes, 7987 MB against 8817 MB" in first
    assert "| not yet measured |" in second, "somebody else used the device"
